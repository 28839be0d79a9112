// SPDX-License-Identifier: Apache-2.0
#include "rms_norm/rms_norm.h"

#include <algorithm>
#include <cmath>

// Plain loops that the compiler vectorises, once per instruction set if it supports a choice at run time.
#if defined(__x86_64__) && defined(__linux__)
#define DFLASH_FOR_EACH_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DFLASH_FOR_EACH_ISA
#endif

namespace dflash {
namespace {

constexpr int64_t kLanes = 16;           // partial sums, so that the order of additions is the same everywhere
constexpr int64_t kMinFloats = 1 << 16;  // elements per part; below this, waking a thread should not pay

DFLASH_FOR_EACH_ISA
void norm_row(const float* __restrict__ x, int64_t dim, const float* __restrict__ weight, float eps,
              float* __restrict__ out) {
  float sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) sums[lane] += x[i + lane] * x[i + lane];
  }
  float sum = 0;
  for (; i < dim; ++i) sum += x[i] * x[i];
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += sums[lane];
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
  for (i = 0; i < dim; ++i) out[i] = x[i] * factor * weight[i];
}

}  // namespace

void rms_norm(const float* x, int64_t rows, int64_t dim, const float* weight, float eps, float* out,
              const Threads& threads) {
  const int64_t at_once = std::max<int64_t>(1, kMinFloats / std::max<int64_t>(1, dim));
  for_each(threads, (rows + at_once - 1) / at_once, [&](int64_t part) {
    for (int64_t row = part * at_once; row < std::min(rows, (part + 1) * at_once); ++row) {
      norm_row(x + row * dim, dim, weight, eps, out + row * dim);
    }
  });
}

}  // namespace dflash
