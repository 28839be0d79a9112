// SPDX-License-Identifier: Apache-2.0
#include "packing/pack.h"

#include <bit>
#include <cmath>
#include <string>

#include "packing/kernels.h"
#include "packing/parallel.h"

namespace dflash {
namespace {

constexpr int64_t kGrain = 256;        // elements that one step of the widest kernel handles
constexpr int64_t kMinPart = 1 << 16;  // elements worth a thread: tens of microseconds of work

Kernels kernels_for(Isa isa, WeightType type) {
#if DFLASH_X86_KERNELS
  if (isa == Isa::kAvx512) return avx512_kernels(type);
  if (isa == Isa::kAvx2) return avx2_kernels(type);
#endif
  static_cast<void>(isa);
  return scalar_kernels(type);
}

void check_scale(const char* name, float scale) {
  if (!(scale > 0 && std::isfinite(scale))) {
    throw std::invalid_argument(std::string("expected a positive finite ") + name + ", found " +
                                std::to_string(scale) +
                                " (an all-zero tensor has no range of its own: any scale serves)");
  }
}

void check_shape(const char* name, const Bytes& bytes, int64_t rows, int64_t cols) {
  if (bytes.rows != rows || bytes.cols != cols) {
    throw std::invalid_argument(std::string("expected ") + name + " of shape [" +
                                std::to_string(rows) + ", " + std::to_string(cols) +
                                "], found [" + std::to_string(bytes.rows) + ", " +
                                std::to_string(bytes.cols) + "]");
  }
}

const std::byte* element(const Weights& weights, int64_t index) {
  return weights.data + index * bytes_of(weights.type);
}

// Throws for the first weight that is not finite, given that some weight is not.
[[noreturn]] void throw_non_finite(const Weights& weights) {
  const Kernels scalar = scalar_kernels(weights.type);
  int64_t index = 0;
  while (scalar.amax(element(weights, index), 1) < kInfinityBits) ++index;
  const bool is_infinity = scalar.amax(element(weights, index), 1) == kInfinityBits;
  throw NonFiniteError(std::string("expected finite weights, found ") +
                       (is_infinity ? "infinity" : "NaN") + " at flat index " +
                       std::to_string(index) + " (row " + std::to_string(index / weights.cols) +
                       ", column " + std::to_string(index % weights.cols) + ")");
}

// part(kernels, begin, end) over all elements in `execution.threads` threads; returns max |w|.
template <class Part>
float run(const Weights& weights, Execution execution, Part part) {
  if (execution.threads < 0) {
    throw std::invalid_argument("expected threads >= 0 (0: all), found " +
                                std::to_string(execution.threads));
  }
  const Kernels kernels = kernels_for(execution.isa, weights.type);
  const uint32_t largest =
      parallel_max(weights.rows * weights.cols, kGrain, kMinPart, execution.threads,
                   [&](int64_t begin, int64_t end) { return part(kernels, begin, end); });
  if (largest >= kInfinityBits) throw_non_finite(weights);
  return std::bit_cast<float>(largest);
}

}  // namespace

float amax(const Weights& weights, Execution execution) {
  return run(weights, execution, [&](const Kernels& kernels, int64_t begin, int64_t end) {
    return kernels.amax(element(weights, begin), end - begin);
  });
}

void pack_fp8(const Weights& weights, float scale, Bytes out, Execution execution) {
  check_scale("scale", scale);
  check_shape("out", out, weights.rows, weights.cols);
  run(weights, execution, [&](const Kernels& kernels, int64_t begin, int64_t end) {
    return kernels.fp8(element(weights, begin), end - begin, scale, out.data + begin);
  });
}

void pack_nvfp4(const Weights& weights, float scale_2, Bytes data, Bytes scales,
                Execution execution) {
  if (weights.cols % kBlock != 0) {
    throw std::invalid_argument("expected columns in multiples of 16, the NVFP4 block, found " +
                                std::to_string(weights.cols) + " = 16 * " +
                                std::to_string(weights.cols / kBlock) + " + " +
                                std::to_string(weights.cols % kBlock));
  }
  check_scale("scale_2", scale_2);
  check_shape("out_data", data, weights.rows, weights.cols / 2);
  check_shape("out_scales", scales, weights.rows, weights.cols / kBlock);
  run(weights, execution, [&](const Kernels& kernels, int64_t begin, int64_t end) {
    return kernels.nvfp4(element(weights, begin), (end - begin) / kBlock, scale_2,
                         data.data + begin / 2, scales.data + begin / kBlock);
  });
}

}  // namespace dflash
