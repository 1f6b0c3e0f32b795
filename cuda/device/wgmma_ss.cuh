// wgmma with both operands in shared memory and fp32 accumulators, for the tile widths that the
// attention kernels use. CuTe has widths such as 112 only in a header that takes 50 s to
// compile.
#pragma once

#include <cstdint>

#include "config.h"

namespace fa {

// d (64 x kColumns fragment) = a * b, or += with `accumulate`; a and b are descriptors of 64 x 16
// and kColumns x 16 elements, K-major, or with a transpose MN-major.
template <DataType kType, int kColumns>
struct WgmmaSs;

// Eight accumulator registers each.
#define FA_REGISTERS_0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define FA_REGISTERS_1 "%8,%9,%10,%11,%12,%13,%14,%15"
#define FA_REGISTERS_2 "%16,%17,%18,%19,%20,%21,%22,%23"
#define FA_REGISTERS_3 "%24,%25,%26,%27,%28,%29,%30,%31"
#define FA_REGISTERS_4 "%32,%33,%34,%35,%36,%37,%38,%39"
#define FA_REGISTERS_5 "%40,%41,%42,%43,%44,%45,%46,%47"
#define FA_REGISTERS_6 "%48,%49,%50,%51,%52,%53,%54,%55"
#define FA_REGISTERS_7 "%56,%57,%58,%59,%60,%61,%62,%63"
#define FA_OPERANDS(i)                                                                        \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])

#define FA_DEFINE_WGMMA(type, ptx_type, columns, registers, a, b, predicate, transpose_a,          \
                        transpose_b, ...)                                                          \
  template <>                                                                                      \
  struct WgmmaSs<DataType::type, columns> {                                                        \
    template <bool kTransposeA = false, bool kTransposeB = false>                                  \
    static __device__ void issue(float (&d)[columns / 2], uint64_t desc_a, uint64_t desc_b,        \
                                 bool accumulate) {                                                \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " predicate                                      \
                   ", 0;\n"                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." ptx_type "." ptx_type   \
                   " {" registers "}, " a ", " b ", p, 1, 1, " transpose_a ", " transpose_b ";}\n" \
                   : __VA_ARGS__                                                                   \
                   : "l"(desc_a), "l"(desc_b), "r"(static_cast<int>(accumulate)),                  \
                     "n"(int{kTransposeA}), "n"(int{kTransposeB}));                                \
    }                                                                                              \
  };

#define FA_WGMMA_48(type, ptx_type)                                                                \
  FA_DEFINE_WGMMA(type, ptx_type, 48, FA_REGISTERS_0 "," FA_REGISTERS_1 "," FA_REGISTERS_2, "%24", \
                  "%25", "%26", "%27", "%28", FA_OPERANDS(0), FA_OPERANDS(8), FA_OPERANDS(16))
FA_WGMMA_48(bf16, "bf16")
FA_WGMMA_48(f16, "f16")
#undef FA_WGMMA_48
#define FA_WGMMA_64(type, ptx_type)                                                               \
  FA_DEFINE_WGMMA(type, ptx_type, 64,                                                             \
                  FA_REGISTERS_0 "," FA_REGISTERS_1 "," FA_REGISTERS_2 "," FA_REGISTERS_3, "%32", \
                  "%33", "%34", "%35", "%36", FA_OPERANDS(0), FA_OPERANDS(8), FA_OPERANDS(16),    \
                  FA_OPERANDS(24))
FA_WGMMA_64(bf16, "bf16")
FA_WGMMA_64(f16, "f16")
#undef FA_WGMMA_64
#define FA_WGMMA_80(type, ptx_type)                                                       \
  FA_DEFINE_WGMMA(type, ptx_type, 80,                                                     \
                  FA_REGISTERS_0 "," FA_REGISTERS_1 "," FA_REGISTERS_2 "," FA_REGISTERS_3 \
                                 "," FA_REGISTERS_4,                                      \
                  "%40", "%41", "%42", "%43", "%44", FA_OPERANDS(0), FA_OPERANDS(8),      \
                  FA_OPERANDS(16), FA_OPERANDS(24), FA_OPERANDS(32))
FA_WGMMA_80(bf16, "bf16")
FA_WGMMA_80(f16, "f16")
#undef FA_WGMMA_80
#define FA_WGMMA_96(type, ptx_type)                                                       \
  FA_DEFINE_WGMMA(type, ptx_type, 96,                                                     \
                  FA_REGISTERS_0 "," FA_REGISTERS_1 "," FA_REGISTERS_2 "," FA_REGISTERS_3 \
                                 "," FA_REGISTERS_4 "," FA_REGISTERS_5,                   \
                  "%48", "%49", "%50", "%51", "%52", FA_OPERANDS(0), FA_OPERANDS(8),      \
                  FA_OPERANDS(16), FA_OPERANDS(24), FA_OPERANDS(32), FA_OPERANDS(40))
FA_WGMMA_96(bf16, "bf16")
FA_WGMMA_96(f16, "f16")
#undef FA_WGMMA_96
#define FA_WGMMA_112(type, ptx_type)                                                       \
  FA_DEFINE_WGMMA(type, ptx_type, 112,                                                     \
                  FA_REGISTERS_0 "," FA_REGISTERS_1 "," FA_REGISTERS_2 "," FA_REGISTERS_3  \
                                 "," FA_REGISTERS_4 "," FA_REGISTERS_5 "," FA_REGISTERS_6, \
                  "%56", "%57", "%58", "%59", "%60", FA_OPERANDS(0), FA_OPERANDS(8),       \
                  FA_OPERANDS(16), FA_OPERANDS(24), FA_OPERANDS(32), FA_OPERANDS(40),      \
                  FA_OPERANDS(48))
FA_WGMMA_112(bf16, "bf16")
FA_WGMMA_112(f16, "f16")
#undef FA_WGMMA_112
#define FA_WGMMA_128(type, ptx_type)                                                             \
  FA_DEFINE_WGMMA(                                                                               \
      type, ptx_type, 128,                                                                       \
      FA_REGISTERS_0 "," FA_REGISTERS_1 "," FA_REGISTERS_2 "," FA_REGISTERS_3 "," FA_REGISTERS_4 \
                     "," FA_REGISTERS_5 "," FA_REGISTERS_6 "," FA_REGISTERS_7,                   \
      "%64", "%65", "%66", "%67", "%68", FA_OPERANDS(0), FA_OPERANDS(8), FA_OPERANDS(16),        \
      FA_OPERANDS(24), FA_OPERANDS(32), FA_OPERANDS(40), FA_OPERANDS(48), FA_OPERANDS(56))
FA_WGMMA_128(bf16, "bf16")
FA_WGMMA_128(f16, "f16")
#undef FA_WGMMA_128

#undef FA_REGISTERS_0
#undef FA_REGISTERS_1
#undef FA_REGISTERS_2
#undef FA_REGISTERS_3
#undef FA_REGISTERS_4
#undef FA_REGISTERS_5
#undef FA_REGISTERS_6
#undef FA_REGISTERS_7
#undef FA_OPERANDS
#undef FA_DEFINE_WGMMA

}  // namespace fa
