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

// NVFP4: neighbours in a row that share one e4m3 scale.
inline constexpr int64_t kBlock = 16;

}  // namespace dflash
