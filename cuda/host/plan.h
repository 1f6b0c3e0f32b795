// What a call gets: problem in, kernel, grid and memory out. Pure host code without CUDA,
// so that tracing, tests and machines without a GPU use the same functions as the launch.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "config.h"

namespace fa {

// A correct call for which no kernel exists or is built.
struct NotCovered : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct EpilogueProblem {
  DataType out_dtype;
  ColumnOrder column_order = ColumnOrder::plain;
  int64_t batch = 1;      // product of the leading batch axes
  int64_t heads_kv = 1;   // heads of acc
  int64_t sequences = 1;  // sequences that share an output buffer (1 when dense)
  int64_t rows = 0;       // rows of acc per head and sequence
  int64_t head_dim = 0;
  int64_t qhead_per_khead = 1;
  // Queries of the output buffer: total_q when packed, rows / qhead_per_khead when dense.
  int64_t seqlen = 0;
};

struct EpiloguePlan {
  EpilogueConfig config;
  std::string kernel;  // its name in the kernel table
  bool built;
  int row_blocks;  // CTAs along the rows of the output buffer
  int grid;        // CTAs; 0: nothing to do, no launch
  int num_threads;
  int smem_bytes;
};

EpiloguePlan plan_epilogue(const EpilogueProblem& problem);

struct CombineProblem {
  DataType out_dtype;
  int64_t batch = 1;  // product of the leading batch axes
  int64_t heads = 1;
  int64_t seqlen = 0;
  int64_t head_dim = 0;
  int64_t num_splits = 1;
};

struct CombinePlan {
  CombineConfig config;
  std::string kernel;
  bool built;
  int queries_per_warp;  // consecutive queries of one head: a task
  int seqlen_blocks;     // tasks along the queries
  int num_tasks;
  int grid;
  int num_threads;
  int smem_bytes;
};

CombinePlan plan_combine(const CombineProblem& problem);

}  // namespace fa
