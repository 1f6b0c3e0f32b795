// What the handlers share: FFI buffers -> dtypes, sizes and batch maps, and C++ exceptions -> FFI
// errors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/batch_map.h"
#include "host/launch.h"
#include "host/plan.h"
#include "xla/ffi/api/ffi.h"

namespace fa {

namespace ffi = xla::ffi;

using Dimensions = ffi::AnyBuffer::Dimensions;

inline void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

inline DataType data_type(ffi::DataType type) {
  if (type == ffi::BF16) return DataType::bf16;
  if (type == ffi::F16) return DataType::f16;
  require(type == ffi::F32, "output dtype must be bfloat16, float16 or float32");
  return DataType::f32;
}

inline int64_t product(Dimensions dimensions, size_t begin, size_t end) {
  int64_t result = 1;
  for (size_t i = begin; i < end; ++i) result *= dimensions[i];
  return result;
}

// Fills the map from each operand's leading axes and its step along them. `steps[operand][axis]` is
// the distance between neighbours of a batch axis the operand really has. Axes of size 1 vanish,
// and neighbours that every operand walks with one stride become one.
template <int kNumOperands>
BatchMap<kNumOperands> make_batch_map(Dimensions result, size_t num_batch_dims,
                                      const std::vector<int64_t> (&steps)[kNumOperands]) {
  BatchMap<kNumOperands> map;
  for (size_t axis = 0; axis < num_batch_dims; ++axis) {
    if (result[axis] == 1) continue;
    bool merges = map.num_axes > 0;
    for (int operand = 0; merges && operand < kNumOperands; ++operand) {
      merges = map.stride[operand][map.num_axes - 1] == result[axis] * steps[operand][axis];
    }
    if (merges) {
      map.size[map.num_axes - 1] *= static_cast<int>(result[axis]);
    } else {
      if (map.num_axes == BatchMap<kNumOperands>::kMaxAxes) {
        throw NotCovered("more than " + std::to_string(BatchMap<kNumOperands>::kMaxAxes) +
                         " nested batch axes that broadcast differently");
      }
      map.size[map.num_axes++] = static_cast<int>(result[axis]);
    }
    for (int operand = 0; operand < kNumOperands; ++operand) {
      map.stride[operand][map.num_axes - 1] = steps[operand][axis];
    }
  }
  return map;
}

// Steps of an operand along its leading axes, which are contiguous from `innermost` outwards except
// that axes of size 1 do not move. Checks that each axis has the result's size or 1.
inline std::vector<int64_t> batch_steps(const char* operand, Dimensions dimensions,
                                        Dimensions result, size_t num_batch_dims,
                                        int64_t innermost) {
  std::vector<int64_t> steps(num_batch_dims, 0);
  for (size_t axis = num_batch_dims; axis-- > 0;) {
    require(dimensions[axis] == result[axis] || dimensions[axis] == 1,
            std::string(operand) + ": batch axis " + std::to_string(axis) + " has size " +
                std::to_string(dimensions[axis]) + ", the result " + std::to_string(result[axis]));
    if (dimensions[axis] != 1) steps[axis] = innermost;
    innermost *= dimensions[axis];
  }
  return steps;
}

// A descriptor (*b, 1 or heads, length) i32 and its steps. It is equal for all heads; the partitioner
// wants it repeated, and the first copy is read.
inline const int32_t* descriptor(const char* name, const ffi::AnyBuffer& buffer, Dimensions result,
                                 size_t num_batch_dims, int64_t heads, int64_t length,
                                 std::vector<int64_t>& steps) {
  const Dimensions shape = buffer.dimensions();
  require(buffer.element_type() == ffi::S32 && shape.size() == num_batch_dims + 2 &&
              (shape[num_batch_dims] == 1 || shape[num_batch_dims] == heads) &&
              shape[num_batch_dims + 1] == length,
          std::string(name) + ": wrong dtype or shape");
  steps = batch_steps(name, shape, result, num_batch_dims, shape[num_batch_dims] * length);
  return static_cast<const int32_t*>(buffer.untyped_data());
}

// Sequences that an operand of offsets (*b, heads, N + 1) separates.
inline int64_t sequences_of(const char* name, const ffi::AnyBuffer& offsets) {
  const Dimensions shape = offsets.dimensions();
  require(shape.size() > 0 && shape.back() > 0, std::string(name) + ": wrong shape");
  return shape.back() - 1;
}

// Runs a handler's body and turns what it throws into the error the user sees as a Python
// exception.
template <typename Body>
ffi::Error guarded(Body body) {
  try {
    body();
    return ffi::Error::Success();
  } catch (const NotCovered& error) {
    return ffi::Error(ffi::ErrorCode::kUnimplemented, error.what());
  } catch (const std::invalid_argument& error) {
    return ffi::Error::InvalidArgument(error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

}  // namespace fa
