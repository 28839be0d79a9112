// SPDX-License-Identifier: Apache-2.0
// Converts a node's attributes and tensors to Params, for both TensorRT and Python.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "kv_injection_attention/append.h"
#include "kv_injection_attention/check.h"
#include "kv_injection_attention/params.h"

namespace dflash::kv_injection {

// The node's attributes by name.
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
  int32_t fp8_cache;     // 1: the context is F8E4M3; 0: as qkv
  int32_t has_qkv_bias;  // 1: the input qkv_bias is present
  int32_t fp8_output;    // 1: the output is F8E4M3; 0: as qkv
  float output_scale;
};

// The node's inputs, in order. Its only output has qkv's axes, the last of size N*D. qkv may also be [B, S, ...], or
// have rows of padding after those of the block; these are neither read nor written in the output.
enum Input : int32_t {
  kQkv,              // [B*S, (N + 2G)*D]        F16 or BF16: query heads, key heads, value heads
  kQNorm,            // [D]                      as qkv
  kKNorm,            // [D]                      as qkv
  kRope,             // [B, S, D]                F32
  kContextPointers,  // [L, kPointerSize]        I64
  kContextLayout,    // [kLayoutSize]            I64
  kPageTable,        // [slots, M]               I32
  kSlotIds,          // [B]                      I32
  kContextLengths,   // [B]                      I32
  kQkvBias,          // [(N + 2G)*D]             as qkv; present if has_qkv_bias
  kSinks,            // [N]                      F32; may be absent
  kMaxInputs,
};

// The input at an index of a node with these attributes.
Input input_at(const Attributes& attributes, int32_t place);
const char* input_name(Input input);

// Throws std::invalid_argument unless a node with these attributes may have this number of inputs.
void expect_inputs(const Attributes& attributes, int32_t count);

// Width of qkv, (N + 2G)*D, and of the output, N*D.
inline int64_t qkv_width(const Attributes& attributes) {
  return (int64_t{attributes.num_heads} + 2 * int64_t{attributes.num_kv_heads}) * attributes.head_dim;
}
inline int64_t output_width(const Attributes& attributes) {
  return int64_t{attributes.num_heads} * attributes.head_dim;
}

enum class ElementType : int32_t { kF16, kBF16, kF8E4M3, kF32, kI32, kI64, kOther };

struct TensorView {
  static constexpr int32_t kMaxRank = 8;
  ElementType type;
  int32_t rank;
  std::array<int64_t, kMaxRank> shape;
  void* data;  // may be null as long as only shapes are known
};

// The call described by inputs and output, without workspace and stream. Throws std::invalid_argument if their number,
// dtypes or shapes do not match each other and the attributes.
Params make_params(const Attributes& attributes, std::span<const TensorView> tensors, const TensorView& out);

// Params with the attributes only; all sizes are 0.
Params make_params(const Attributes& attributes);

// check_sizes for the attributes, B and S; all other sizes and dtypes are chosen to match.
Problem check_limits(const Attributes& attributes, int32_t batch, int32_t block);

// The inputs of an append, in order.
enum AppendInput : int32_t {
  kNewRows,  // [T, 2, L, G, D]           any dtype but kOther
  kPageIds,  // [T]                       I32
  kOffsets,  // [T]                       I32
  kAppendInputs,
};
const char* append_input_name(int32_t input);

// The append of kAppendInputs inputs to both caches [pages, L, R, G, D], without stream. Throws as make_params does.
AppendParams make_append_params(std::span<const TensorView> inputs, const TensorView& k_cache,
                                const TensorView& v_cache);

}  // namespace dflash::kv_injection
