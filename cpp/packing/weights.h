// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash {

enum class WeightType { kBf16, kF16, kF32 };

// One weight matrix as it lies in a checkpoint: row-major, little-endian, at any alignment.
struct Weights {
  const std::byte* data;  // [rows, cols] of `type`
  WeightType type;
  int64_t rows;
  int64_t cols;
};

// A matrix of bytes that a packer fills.
struct Bytes {
  uint8_t* data;  // [rows, cols]
  int64_t rows;
  int64_t cols;
};

constexpr int64_t bytes_of(WeightType type) { return type == WeightType::kF32 ? 4 : 2; }

// A matrix of numbers that a packer fills.
struct Scales {
  float* data;  // [rows, cols]
  int64_t rows;
  int64_t cols;
};

// NVFP4: neighbours in a row that share one e4m3 scale.
inline constexpr int64_t kBlock = 16;
// INT4: neighbours in a row that share one scale.
inline constexpr int64_t kInt4Block = 32;
// A block's largest magnitude counts as so many of its scale.
inline constexpr float kInt4Steps[] = {7, 7.25f, 7.5f, 7.75f, 8};

}  // namespace dflash
