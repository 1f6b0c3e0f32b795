// A position in a ring of shared-memory stages: the stage and the parity its barriers have there.
#pragma once

#include <cstdint>

namespace fa {

template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ RingPosition previous() const {
    return stage == 0 ? RingPosition{kStages - 1, phase ^ 1} : RingPosition{stage - 1, phase};
  }
};

}  // namespace fa
