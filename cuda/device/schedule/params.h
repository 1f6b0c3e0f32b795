// Kernel parameters of the schedule of packed sequences.
#pragma once

#include "device/forward/params.h"

namespace fa {

struct ScheduleParams {
  ForwardParams forward;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
};

}  // namespace fa
