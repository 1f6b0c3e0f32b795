// What the softmax left for a row: how to scale it, whether it is empty, and its LSE.
//
//   normalised:    O = acc,            LSE = lse
//   unnormalised:  O = acc / row_sum,  LSE = row_max + log(row_sum)
//
// A row without any key (lse = -inf, or row_sum = 0, or row_max = -inf) is empty: O = 0 whatever acc holds, LSE = -inf.
// NaN statistics give NaN, in O as well: a broken softmax must not look like an empty row.
#pragma once

#include <cmath>

namespace fa {

struct RowStatistics {
  float scale = 0.f;
  float lse = -INFINITY;  // -inf: the row is empty

  __device__ float apply(float acc) const { return lse == -INFINITY ? 0.f : acc * scale; }

  static __device__ RowStatistics normalised(float lse) { return {isnan(lse) ? NAN : 1.f, lse}; }

  static __device__ RowStatistics unnormalised(float row_max, float row_sum) {
    if (isnan(row_max) || isnan(row_sum)) return {NAN, NAN};
    if (row_sum == 0.f || row_max == -INFINITY) return {0.f, -INFINITY};
    const float lse = row_max + logf(row_sum);
    return {isnan(lse) ? NAN : 1.f / row_sum, lse};
  }
};

}  // namespace fa
