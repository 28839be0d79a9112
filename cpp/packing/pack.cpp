// SPDX-License-Identifier: Apache-2.0
#include "packing/pack.h"

#include <bit>
#include <cmath>
#include <string>

#include "packing/formulas.h"
#include "packing/parallel.h"

namespace dflash {
namespace {

constexpr int64_t kGrain = 256;        // grain of a range: a multiple of kBlock and kInt4Block
constexpr int64_t kMinPart = 1 << 16;  // elements per thread: at least a tenth of a millisecond of work

// Calls function.operator()<kType>() for a type of weights known at run time.
template <class Function>
auto with_type(WeightType type, Function function) {
  switch (type) {
    case WeightType::kBf16:
      return function.template operator()<WeightType::kBf16>();
    case WeightType::kF16:
      return function.template operator()<WeightType::kF16>();
    case WeightType::kF32:
      break;
  }
  return function.template operator()<WeightType::kF32>();
}

void check_scale(const char* name, float scale) {
  if (!(scale > 0 && std::isfinite(scale))) {
    throw std::invalid_argument(std::string("expected a positive finite ") + name + ", found " + std::to_string(scale) +
                                " (an all-zero tensor has no range of its own: any scale serves)");
  }
}

template <class Matrix>
void check_shape(const char* name, const Matrix& matrix, int64_t rows, int64_t cols) {
  if (matrix.rows != rows || matrix.cols != cols) {
    throw std::invalid_argument(std::string("expected ") + name + " of shape [" + std::to_string(rows) + ", " +
                                std::to_string(cols) + "], found [" + std::to_string(matrix.rows) + ", " +
                                std::to_string(matrix.cols) + "]");
  }
}

void check_blocks(const std::string& format, int64_t block, int64_t cols) {
  if (cols % block != 0) {
    const std::string size = std::to_string(block);
    throw std::invalid_argument("expected columns in multiples of " + size + ", the " + format + " block, found " +
                                std::to_string(cols) + " = " + size + " * " + std::to_string(cols / block) + " + " +
                                std::to_string(cols % block));
  }
}

const std::byte* element(const Weights& weights, int64_t index) {
  return weights.data + index * bytes_of(weights.type);
}

// Throws for the first weight that is not finite; there must be one.
[[noreturn]] void throw_non_finite(const Weights& weights) {
  const auto magnitude = [&](int64_t index) {
    return with_type(weights.type, [&]<WeightType kType> { return amax_bits<kType>(element(weights, index), 1); });
  };
  int64_t index = 0;
  while (magnitude(index) < kInfinityBits) ++index;
  const bool is_infinity = magnitude(index) == kInfinityBits;
  throw NonFiniteError(std::string("expected finite weights, found ") + (is_infinity ? "infinity" : "NaN") +
                       " at flat index " + std::to_string(index) + " (row " + std::to_string(index / weights.cols) +
                       ", column " + std::to_string(index % weights.cols) + ")");
}

// Runs part<kType>(begin, end) over `count` elements of the output on `threads` threads; returns max |w|.
template <class Part>
float run(const Weights& weights, int64_t count, int threads, Part part) {
  if (threads < 0) {
    throw std::invalid_argument("expected threads >= 0 (0: all), found " + std::to_string(threads));
  }
  const uint32_t largest = with_type(weights.type, [&]<WeightType kType> {
    return parallel_max(count, kGrain, kMinPart, threads,
                        [&](int64_t begin, int64_t end) { return part.template operator()<kType>(begin, end); });
  });
  if (largest >= kInfinityBits) throw_non_finite(weights);
  return std::bit_cast<float>(largest);
}

}  // namespace

float amax(const Weights& weights, int threads) {
  return run(weights, weights.rows * weights.cols, threads, [&]<WeightType kType>(int64_t begin, int64_t end) {
    return amax_bits<kType>(element(weights, begin), end - begin);
  });
}

void pack_fp8(const Weights& weights, float scale, Bytes out, int threads) {
  check_scale("scale", scale);
  check_shape("out", out, weights.rows, weights.cols);
  run(weights, weights.rows * weights.cols, threads, [&]<WeightType kType>(int64_t begin, int64_t end) {
    return fp8<kType>(element(weights, begin), end - begin, scale, out.data + begin);
  });
}

void pack_nvfp4(const Weights& weights, float scale_2, Bytes data, Bytes scales, int threads) {
  check_blocks("NVFP4", kBlock, weights.cols);
  check_scale("scale_2", scale_2);
  check_shape("out_data", data, weights.rows, weights.cols / 2);
  check_shape("out_scales", scales, weights.rows, weights.cols / kBlock);
  run(weights, weights.rows * weights.cols, threads, [&]<WeightType kType>(int64_t begin, int64_t end) {
    return nvfp4<kType>(element(weights, begin), (end - begin) / kBlock, scale_2, data.data + begin / 2,
                        scales.data + begin / kBlock);
  });
}

void pack_int4(const Weights& weights, Bytes data, Scales scales, int threads) {
  check_blocks("INT4", kInt4Block, weights.cols);
  if (weights.rows % 2 != 0) {
    throw std::invalid_argument("expected an even number of rows, as two share a byte, found " +
                                std::to_string(weights.rows));
  }
  check_shape("out_data", data, weights.rows / 2, weights.cols);
  check_shape("out_scales", scales, weights.rows, weights.cols / kInt4Block);
  run(weights, weights.rows / 2 * weights.cols, threads, [&]<WeightType kType>(int64_t begin, int64_t end) {
    return int4<kType>(weights.data, weights.cols, begin / kInt4Block, end / kInt4Block, data.data, scales.data);
  });
}

}  // namespace dflash
