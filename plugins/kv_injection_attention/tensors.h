// SPDX-License-Identifier: Apache-2.0
// From the node's attributes and tensors to Params, for TensorRT and Python alike.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// The node's attributes, under their names.
struct Attributes {
  int32_t layer;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  float rms_norm_eps;
  float softmax_scale;
  int32_t sliding_window;
  int32_t causal;
  float k_scale;
  float v_scale;
};

// The node's inputs, in order. Its one output has q's shape and dtype.
enum Input : int32_t {
  kQ,               // [B, S, N*D]               F16 or BF16
  kK,               // [B, S, G*D]               as q
  kV,               // [B, S, G*D]               as q
  kQNorm,           // [D]                       as q
  kKNorm,           // [D]                       as q
  kRope,            // [B, S, D]                 F32
  kKCache,          // [slots, L, C_max, G, D]   as q, or F8E4M3
  kVCache,          // [slots, L, C_max, G, D]   as k_cache
  kSlotIds,         // [B]                       I32
  kContextLengths,  // [B]                       I32
  kSinks,           // [N]                       F32; may be absent
  kMaxInputs,
};
inline constexpr int32_t kMinInputs = kSinks;
const char* input_name(int32_t input);

enum class ElementType : int32_t { kF16, kBF16, kF8E4M3, kF32, kI32, kOther };

struct Tensor {
  static constexpr int32_t kMaxRank = 8;
  ElementType type;
  int32_t rank;
  std::array<int64_t, kMaxRank> shape;
  void* data;  // may be null while only shapes are known
};

// The call that kMinInputs or kMaxInputs inputs and the output describe, without workspace and
// stream. Throws std::invalid_argument if dtypes or shapes do not fit each other and the
// attributes.
Params make_params(const Attributes& attributes, std::span<const Tensor> inputs, const Tensor& out);

// Only the attributes; all sizes are 0.
Params make_params(const Attributes& attributes);

}  // namespace dflash::kv_injection
