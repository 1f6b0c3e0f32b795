// The Python module `_native`: which kernels this build has, what a call would get (plans), the FFI
// handlers as capsules, and the index maps for the tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "backward_maps.h"
#include "device/batch_map.h"
#include "forward_maps.h"
#include "host/plan.h"
#include "host/plan_backward.h"
#include "host/plan_forward.h"
#include "host/registry.h"
#include "index_maps.h"
#include "xla/ffi/api/c_api.h"

#if JAX_FA_CUDA_BUILT
#include <cuda_runtime_api.h>

#include "binding/handlers.h"
#include "host/launch.h"
#endif

namespace nb = nanobind;
using namespace nb::literals;

namespace fa {
namespace {

DataType parse_data_type(const std::string& text) {
  for (const DataType type : {DataType::bf16, DataType::f16, DataType::f32}) {
    if (text == name(type)) return type;
  }
  throw std::invalid_argument("out_dtype = '" + text + "', allowed: bf16, f16, f32");
}

nb::dict to_dict(const EpilogueConfig& config) {
  nb::dict dict;
  dict["out_dtype"] = name(config.out_dtype);
  dict["head_dim"] = config.head_dim;
  dict["column_order"] = name(config.column_order);
  dict["block_m"] = config.block_m;
  dict["blocks_per_sm"] = config.blocks_per_sm;
  return dict;
}

nb::dict to_dict(const CombineConfig& config) {
  nb::dict dict;
  dict["out_dtype"] = name(config.out_dtype);
  dict["head_dim"] = config.head_dim;
  return dict;
}

nb::dict to_dict(const ForwardConfig& config) {
  nb::dict dict;
  dict["dtype"] = name(config.dtype);
  dict["head_dim"] = config.head_dim;
  dict["head_dim_v"] = config.head_dim_v;
  dict["output"] = name(config.output);
  dict["block_m"] = config.block_m;
  dict["block_n"] = config.block_n;
  dict["stages"] = config.stages;
  return dict;
}

nb::dict to_dict(const ScheduleConfig& config) {
  nb::dict dict;
  dict["max_threads"] = config.max_threads;
  dict["items"] = config.items;
  return dict;
}

nb::dict to_dict(const BackwardConfig& config) {
  nb::dict dict;
  dict["dtype"] = name(config.dtype);
  dict["head_dim"] = config.head_dim;
  dict["head_dim_v"] = config.head_dim_v;
  dict["block_m"] = config.block_m;
  dict["block_n"] = config.block_n;
  dict["stages"] = config.stages;
  return dict;
}

nb::dict to_dict(const PreprocessConfig& config) {
  nb::dict dict;
  dict["dtype"] = name(config.dtype);
  return dict;
}

nb::dict to_dict(const PostprocessConfig& config) {
  nb::dict dict;
  dict["dtype"] = name(config.dtype);
  dict["head_dim"] = config.head_dim;
  dict["block_m"] = config.block_m;
  return dict;
}

nb::dict to_dict(const BackwardLaunch& launch) {
  nb::dict dict;
  dict["kernel"] = launch.kernel;
  dict["built"] = launch.built;
  dict["grid"] = launch.grid;
  dict["num_threads"] = launch.num_threads;
  dict["smem_bytes"] = launch.smem_bytes;
  dict["cluster"] = launch.cluster;
  return dict;
}

template <typename Kernel>
nb::dict to_dict(const Kernel& kernel, const char* operation, int num_threads) {
  nb::dict dict = to_dict(kernel.config);
  dict["name"] = kernel.name;
  dict["operation"] = operation;
  dict["built"] = kernel.symbol != nullptr;
  dict["num_threads"] = num_threads;
  return dict;
}

template <typename Plan>
nb::dict to_dict(const Plan& plan) {
  nb::dict dict = to_dict(plan.config);
  dict["kernel"] = plan.kernel;
  dict["built"] = plan.built;
  dict["grid"] = plan.grid;
  dict["num_threads"] = plan.num_threads;
  dict["smem_bytes"] = plan.smem_bytes;
  return dict;
}

nb::list kernels() {
  nb::list list;
  for (const EpilogueKernel& kernel : epilogue_kernels()) {
    list.append(to_dict(kernel, "epilogue", epilogue_num_threads(kernel.config)));
  }
  for (const CombineKernel& kernel : combine_kernels()) {
    list.append(to_dict(kernel, "combine", kCombineWarps * kWarpSize));
  }
  for (const ForwardKernel& kernel : forward_kernels()) {
    list.append(to_dict(kernel, "forward", forward_num_threads(kernel.config)));
  }
  for (const ScheduleKernel& kernel : schedule_kernels()) {
    list.append(to_dict(kernel, "schedule", kernel.config.max_threads));
  }
  for (const BackwardKernel& kernel : backward_kernels()) {
    list.append(to_dict(kernel, "backward", backward_num_threads(kernel.config)));
  }
  for (const PreprocessKernel& kernel : preprocess_kernels()) {
    list.append(to_dict(kernel, "preprocess", kPreprocessThreads));
  }
  for (const PostprocessKernel& kernel : postprocess_kernels()) {
    list.append(to_dict(kernel, "postprocess", kPostprocessThreads));
  }
  return list;
}

nb::dict handlers() {
  nb::dict dict;
#if JAX_FA_CUDA_BUILT
  dict["jax_fa_epilogue_epilogue_v1"] = nb::capsule(reinterpret_cast<void*>(epilogue_handler));
  dict["jax_fa_epilogue_combine_v1"] = nb::capsule(reinterpret_cast<void*>(combine_handler));
  dict["jax_fa_epilogue_forward_v1"] = nb::capsule(reinterpret_cast<void*>(forward_handler));
  dict["jax_fa_epilogue_backward_v1"] = nb::capsule(reinterpret_cast<void*>(backward_handler));
#endif
  return dict;
}

}  // namespace
}  // namespace fa

NB_MODULE(_native, module) {
  using namespace fa;

  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const NotCovered& error) {
      PyErr_SetString(PyExc_NotImplementedError, error.what());
    }
  });

  module.attr("cuda_built") = static_cast<bool>(JAX_FA_CUDA_BUILT);
  module.def("ffi_api_version",
             [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  module.def("cuda_version", [] {
#if JAX_FA_CUDA_BUILT
    return CUDART_VERSION;
#else
    return 0;
#endif
  });
  module.attr("max_batch_axes") = BatchMap<1>::kMaxAxes;
  module.def("handlers", &handlers);
  module.def("kernels", &kernels);

  module.def(
      "plan_epilogue",
      [](const std::string& out_dtype, int64_t batch, int64_t heads_kv, int64_t sequences,
         int64_t rows, int64_t head_dim, int64_t qhead_per_khead, int64_t total_q,
         bool fp8_permuted_columns) {
        EpilogueProblem problem;
        problem.out_dtype = parse_data_type(out_dtype);
        problem.column_order = fp8_permuted_columns ? ColumnOrder::fp8 : ColumnOrder::plain;
        problem.batch = batch;
        problem.heads_kv = heads_kv;
        problem.sequences = sequences;
        problem.rows = rows;
        problem.head_dim = head_dim;
        problem.qhead_per_khead = qhead_per_khead;
        problem.seqlen = total_q >= 0 ? total_q : rows / std::max<int64_t>(qhead_per_khead, 1);
        return to_dict(plan_epilogue(problem));
      },
      "out_dtype"_a, "batch"_a, "heads_kv"_a, "sequences"_a, "rows"_a, "head_dim"_a,
      "qhead_per_khead"_a = 1, "total_q"_a = -1, "fp8_permuted_columns"_a = false);
  module.def(
      "plan_combine",
      [](const std::string& out_dtype, int64_t batch, int64_t heads, int64_t seqlen,
         int64_t head_dim, int64_t num_splits) {
        const CombinePlan plan =
            plan_combine({parse_data_type(out_dtype), batch, heads, seqlen, head_dim, num_splits});
        nb::dict dict = to_dict(plan);
        dict["queries_per_warp"] = plan.queries_per_warp;
        dict["num_tasks"] = plan.num_tasks;
        return dict;
      },
      "out_dtype"_a, "batch"_a, "heads"_a, "seqlen"_a, "head_dim"_a, "num_splits"_a);

  module.def(
      "plan_forward",
      [](const std::string& dtype, int64_t batch, int64_t heads_kv, int64_t qhead_per_khead,
         int64_t sequences, int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim,
         int64_t head_dim_v, int64_t max_seqlen_q, int64_t max_seqlen_k, int64_t window_left,
         int64_t window_right, bool has_cu_seqlens, bool has_seqused_q, bool has_seqused_k,
         int pack_gqa, int64_t num_splits, int num_sms) {
        ForwardProblem problem;
        problem.dtype = parse_data_type(dtype);
        problem.batch = batch;
        problem.heads_kv = heads_kv;
        problem.qhead_per_khead = qhead_per_khead;
        problem.sequences = sequences;
        problem.seqlen_q = seqlen_q;
        problem.seqlen_k = seqlen_k;
        problem.max_seqlen_q = max_seqlen_q;
        problem.max_seqlen_k = max_seqlen_k;
        problem.head_dim = head_dim;
        problem.head_dim_v = head_dim_v;
        problem.window_left = window_left;
        problem.window_right = window_right;
        problem.has_cu_seqlens = has_cu_seqlens;
        problem.has_seqused_q = has_seqused_q;
        problem.has_seqused_k = has_seqused_k;
        problem.pack_gqa = static_cast<PackGqa>(pack_gqa);
        problem.num_splits = num_splits;
        const ForwardPlan plan = plan_forward(problem, DeviceInfo{num_sms});
        nb::dict dict = to_dict(plan);
        dict["schedule_kernel"] = plan.schedule_kernel;
        dict["pack_gqa"] = plan.pack_gqa;
        dict["num_splits"] = plan.num_splits;
        dict["rows_per_tile"] = plan.rows_per_tile;
        dict["dynamic"] = plan.dynamic;
        dict["num_tiles"] = plan.num_tiles;
        dict["row_blocks"] = plan.order.row_blocks;
        dict["section_heads"] = plan.order.section_heads;
        dict["last_first"] = plan.order.last_first;
        dict["workspace_size"] = plan.workspace_size;
        return dict;
      },
      nb::kw_only(), "dtype"_a, "batch"_a, "heads_kv"_a, "qhead_per_khead"_a, "sequences"_a = 1,
      "seqlen_q"_a, "seqlen_k"_a, "head_dim"_a, "head_dim_v"_a, "max_seqlen_q"_a = -1,
      "max_seqlen_k"_a = -1, "window_left"_a = -1, "window_right"_a = -1,
      "has_cu_seqlens"_a = false, "has_seqused_q"_a = false, "has_seqused_k"_a = false,
      "pack_gqa"_a = -1, "num_splits"_a = 0, "num_sms"_a = 132,
      "The plan of a forward call: which kernel, tiles and workspace. num_splits 0: final results, "
      "1 or more: partial results, -1: the plan chooses and answers 0 or 2 and more.");

  module.def(
      "plan_backward",
      [](const std::string& dtype, int64_t batch, int64_t heads_kv, int64_t qhead_per_khead,
         int64_t sequences, int64_t seqlen_q, int64_t seqlen_k, int64_t head_dim,
         int64_t head_dim_v, int64_t window_left, int64_t window_right, bool has_cu_seqlens,
         bool has_seqused_q, bool has_seqused_k, bool deterministic, int num_sms) {
        BackwardProblem problem;
        problem.dtype = parse_data_type(dtype);
        problem.batch = batch;
        problem.heads_kv = heads_kv;
        problem.qhead_per_khead = qhead_per_khead;
        problem.sequences = sequences;
        problem.seqlen_q = seqlen_q;
        problem.seqlen_k = seqlen_k;
        problem.head_dim = head_dim;
        problem.head_dim_v = head_dim_v;
        problem.window_left = window_left;
        problem.window_right = window_right;
        problem.has_cu_seqlens = has_cu_seqlens;
        problem.has_seqused_q = has_seqused_q;
        problem.has_seqused_k = has_seqused_k;
        problem.deterministic = deterministic;
        const BackwardPlan plan = plan_backward(problem, DeviceInfo{num_sms});
        nb::dict dict = to_dict(plan.config);
        dict["kernel"] = plan.main.kernel;
        dict["built"] = plan.preprocess.built && plan.main.built && plan.postprocess.built;
        dict["preprocess"] = to_dict(plan.preprocess);
        dict["main"] = to_dict(plan.main);
        dict["postprocess"] = to_dict(plan.postprocess);
        dict["dynamic"] = plan.dynamic;
        dict["num_tiles"] = plan.num_tiles;
        dict["row_blocks"] = plan.order.row_blocks;
        dict["section_heads"] = plan.order.section_heads;
        dict["first_split"] = plan.split.first_split;
        dict["parts"] = plan.split.parts;
        dict["q_slots"] = plan.q_slots;
        dict["dq_accum_size"] = plan.dq_accum_size;
        dict["statistics_size"] = plan.statistics_size;
        dict["semaphore_size"] = plan.semaphore_size;
        dict["semaphores_in_use"] = plan.semaphores_in_use;
        return dict;
      },
      "dtype"_a, "batch"_a, "heads_kv"_a, "qhead_per_khead"_a, "sequences"_a, "seqlen_q"_a,
      "seqlen_k"_a, "head_dim"_a, "head_dim_v"_a, "window_left"_a = -1, "window_right"_a = -1,
      "has_cu_seqlens"_a = false, "has_seqused_q"_a = false, "has_seqused_k"_a = false,
      "deterministic"_a = false, "num_sms"_a = 132);

  nb::module_ maps = module.def_submodule("index_maps", "The kernels' index maps, for the tests.");
  maps.def("accumulator_coordinate", [](int thread, int index) {
    const TileCoordinate at = accumulator_coordinate(thread, index);
    return nb::make_tuple(at.row, at.column);
  });
  maps.def("visible_keys", [](int left, int right, int shift, int seqlen_k, int query) {
    const KeyRange range = visible_keys({left, right, shift}, seqlen_k, query);
    return nb::make_tuple(range.begin, range.end);
  });
  maps.def("key_blocks", [](int left, int right, int shift, int seqlen_k, int first, int last,
                            int block_n) {
    const KeyBlocks blocks = key_blocks({left, right, shift}, seqlen_k, first, last, block_n);
    return nb::make_tuple(blocks.begin, blocks.end, blocks.full_begin, blocks.full_end);
  });
  maps.def("share_of_rows", [](int begin, int end, int own_begin, int own_end, int own_full_begin,
                               int own_full_end) {
    const KeyBlocks blocks =
        share_of_rows({begin, end, 0, 0}, {own_begin, own_end, own_full_begin, own_full_end});
    return nb::make_tuple(blocks.begin, blocks.end, blocks.full_begin, blocks.full_end);
  });
  maps.def("tile_position",
           [](int row_blocks, int heads, int section_heads, bool last_first, int tile) {
             const TilePosition position =
                 tile_position({row_blocks, heads, section_heads, last_first}, tile);
             return nb::make_tuple(position.row_block, position.head);
           });
  maps.def("split_blocks", [](int begin, int end, int split, int num_splits) {
    const KeyBlocks blocks = split_blocks({begin, end, begin, end}, split, num_splits);
    return nb::make_tuple(blocks.begin, blocks.end);
  });
  maps.def("partial_batch", &partial_batch);
  maps.def("work_class", &work_class);
  maps.def("window_probe", &window_probe);
  maps.def("next_window", &next_window);
  maps.def(
      "visible_queries", [](int left, int right, int shift, int seqlen_q, int seqlen_k, int key) {
        const QueryRange range = visible_queries({left, right, shift}, seqlen_q, seqlen_k, key);
        return nb::make_tuple(range.begin, range.end);
      });
  maps.def("seeing_queries", [](int left, int right, int shift, int seqlen_q, int seqlen_k) {
    const QueryRange range = seeing_queries({left, right, shift}, seqlen_q, seqlen_k);
    return nb::make_tuple(range.begin, range.end);
  });
  maps.def("query_blocks", [](int left, int right, int shift, int seqlen_q, int seqlen_k, int first,
                              int block_m, int block_n) {
    const QueryBlocks blocks =
        query_blocks({left, right, shift}, seqlen_q, seqlen_k, first, block_m, block_n);
    return nb::make_tuple(blocks.begin, blocks.end, blocks.full_begin, blocks.full_end);
  });
  maps.def("tile_part", [](int first_split, int parts, int number) {
    const TilePart part = tile_part({first_split, parts}, number);
    return nb::make_tuple(part.tile, part.part, part.part_number);
  });
  maps.def(
      "blocks_of_part", [](int begin, int end, int full_begin, int full_end, int part, int parts) {
        const QueryBlocks blocks = blocks_of_part({begin, end, full_begin, full_end}, part, parts);
        return nb::make_tuple(blocks.begin, blocks.end, blocks.full_begin, blocks.full_end);
      });
  maps.def("last_visitor", [](int left, int right, int shift, int seqlen_q, int seqlen_k, int block,
                              int block_m, int block_n) {
    return last_visitor({left, right, shift}, seqlen_q, seqlen_k, block, block_m, block_n);
  });
  maps.def("span_of", [](const std::vector<int>& cu_seqlens, const std::vector<int>& seqused,
                         int sequence, int total) {
    const Span span = span_of(cu_seqlens.empty() ? nullptr : cu_seqlens.data(),
                              seqused.empty() ? nullptr : seqused.data(), sequence, total);
    return nb::make_tuple(span.begin, span.length);
  });
  maps.def("num_slots", &num_slots);
  maps.def("slot_position", [](const std::vector<int>& cu_seqlens, int num_sequences, int total,
                               int slot, int block) {
    const SlotPosition position = slot_position(cu_seqlens.empty() ? nullptr : cu_seqlens.data(),
                                                num_sequences, total, slot, block);
    return nb::make_tuple(position.sequence, position.row_begin);
  });
  maps.def("dq_coordinate", [](int thread, int index, int block_m, int head_dim, int warpgroups) {
    const TileCoordinate at = dq_coordinate(thread, index, block_m, head_dim, warpgroups);
    return nb::make_tuple(at.row, at.column);
  });
  maps.def("dq_offset", &dq_offset);
  maps.def("fp8_output_column", &fp8_output_column);
  maps.def("swizzle", &swizzle);
  maps.def("panel_columns", &panel_columns);
  maps.def("panel_offset_bytes", &panel_offset_bytes);
  maps.def("acc_offset_bytes", &acc_offset_bytes, "row"_a, "column"_a, "head_dim"_a,
           "element_bytes"_a = 4);
  maps.def("find_sequence", [](const std::vector<int>& offsets, int token) {
    return find_sequence([&](int i) { return offsets.at(i); }, static_cast<int>(offsets.size()) - 1,
                         token);
  });

#if JAX_FA_CUDA_BUILT
  module.def("fail_next_launch", &fail_next_launch, "Test hook: the next launch fails.");
#endif
}
