// SPDX-License-Identifier: Apache-2.0
// DFlashKVInjectionAttention in FLOAT on a CPU; plugins/kv_injection_attention/params.h defines the computation.
//
// Shape letters: B requests, S block, N query heads, G key/value heads, D head_dim, L draft layers. A request's context
// lies in M pages of R rows; with M = 1 a page is a slot of the cache, and R its C_max.
#pragma once

#include <cstdint>

#include "cpu/isa.h"

namespace dflash {

struct BlockAttention {
  int64_t batch;
  int64_t block;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t num_pages;  // P, pages of the cache
  int64_t layers;
  int64_t page_rows;          // R
  int64_t pages_per_request;  // M
  int64_t layer;              // cache layer to read
  int64_t sliding_window;     // 0: off; else a key is visible if |q - k| < sliding_window (positions)
  bool causal;                // block slots do not see later ones
  float rms_norm_eps;
  float softmax_scale;

  const float* qkv;      // [B, S, (N + 2G)*D]
  const float* q_norm;   // [D]
  const float* k_norm;   // [D]
  const float* rope;     // [B, S, D]: cos, then sin
  const float* k_cache;  // [P, L, R, G, D]
  const float* v_cache;
  const int32_t* page_ids;         // [B, M]
  const int32_t* context_lengths;  // [B]
  const float* sinks;              // [N], or null
  float* out;                      // [B, S, N*D]
};

// Returns the first error in sizes, pages or lengths, or null.
const char* problem(const BlockAttention& attention);

// Computes one key/value head of one request. Only visible rows of the cache are read. A row's results depend only on
// its request and the instruction set.
using AttendHead = void (*)(const BlockAttention& attention, int64_t request, int64_t kv_head);
AttendHead attend_head(Isa isa);

void attend_head_avx512(const BlockAttention& attention, int64_t request, int64_t kv_head);
void attend_head_avx2(const BlockAttention& attention, int64_t request, int64_t kv_head);
void attend_head_scalar(const BlockAttention& attention, int64_t request, int64_t kv_head);

}  // namespace dflash
