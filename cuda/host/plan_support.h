// What the plan functions share.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

#include "index_maps.h"

namespace fa {

inline constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();

inline void require(bool condition, const char* argument, int64_t value, const char* allowed) {
  if (!condition) {
    throw std::invalid_argument(std::string(argument) + " = " + std::to_string(value) +
                                ", allowed: " + allowed);
  }
}

inline void check_head_dim(const char* argument, int64_t head_dim) {
  require(head_dim >= 8 && head_dim <= 256 && head_dim % 8 == 0, argument, head_dim,
          "multiples of 8 from 8 to 256");
}

// A side of a window; -1, which bounds nothing, where it reaches the farthest position.
inline int clip_window(int64_t window, int64_t farthest) {
  return window >= farthest ? -1 : static_cast<int>(window);
}

}  // namespace fa
