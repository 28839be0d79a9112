// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash {

enum class WeightType { kBf16, kF16, kF32 };

// A weight matrix as stored in a checkpoint: row-major, little-endian, at any alignment.
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

// NVFP4: adjacent weights of a row that share an e4m3 scale.
inline constexpr int64_t kBlock = 16;
// INT4: adjacent weights of a row that share a scale.
inline constexpr int64_t kInt4Block = 32;
// INT4: candidates for the ratio of a block's largest magnitude to its scale.
inline constexpr float kInt4Steps[] = {7, 7.25f, 7.5f, 7.75f, 8};

}  // namespace dflash
