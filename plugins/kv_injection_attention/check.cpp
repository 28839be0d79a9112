// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/check.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/text.h"
#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/kernel/architecture.h"

namespace dflash::kv_injection {
namespace {

// The kernel copies 16 bytes at a time.
constexpr int32_t kAlignment = 16;
// Queries are premultiplied by softmax_scale * k_scale and stored in FP16 with an FP8 cache or an FP16 block. At this
// bound a query element of 1 is still a normal FP16 number.
constexpr float kMaxScale = 64, kMinScale = 0x1p-14f;

// Keeps the first problem. The checks run before every launch, so a message is built only if one fails.
class Checks {
 public:
  template <typename Found, typename... Expected>
  void expect(bool holds, const char* name, const Found& found, const Expected&... expected) {
    if (holds || problem_) return;
    problem_ = text(name, ": expected ", expected..., ", found ", found);
  }
  void range(const char* name, int64_t value, int64_t least, int64_t most) {
    expect(value >= least && value <= most, name, value, least, " to ", most);
  }
  void at_least(const char* name, int64_t value, int64_t least) {
    expect(value >= least, name, value, "at least ", least);
  }
  void positive(const char* name, float value) {
    expect(std::isfinite(value) && value > 0, name, value, "a positive finite number");
  }
  void tensor(const char* name, const void* pointer, int32_t alignment) {
    expect(pointer != nullptr, name, "a null pointer", "a tensor");
    expect(reinterpret_cast<uintptr_t>(pointer) % alignment == 0, name, pointer, "an address that ", alignment,
           " divides");
  }
  Problem result() { return std::move(problem_); }

 private:
  Problem problem_;
};

void check_heads(Checks& checks, const Params& p) {
  const int32_t D = p.head_dim;
  checks.range("num_heads", p.num_heads, 1, kMaxHeads);
  checks.range("num_kv_heads", p.num_kv_heads, 1, kMaxHeads);
  checks.expect(p.num_kv_heads > 0 && p.num_heads % p.num_kv_heads == 0, "num_kv_heads", p.num_kv_heads,
                "a divisor of num_heads ", p.num_heads);
  checks.expect(D == 64 || D == 96 || D == 128 || D == 256, "head_dim", D, "64, 96, 128 or 256");
}

void check_dtypes(Checks& checks, const Params& p) {
  const char* block = dtype_name(p.block_dtype);
  const char* cache = dtype_name(p.cache_dtype);
  checks.expect(p.block_dtype == DType::kF16 || p.block_dtype == DType::kBF16, "qkv", block, "float16 or bfloat16");
  checks.positive("k_scale", p.k_scale);
  checks.positive("v_scale", p.v_scale);
  const bool scaled = p.cache_dtype == DType::kF8E4M3;
  const float factor = p.softmax_scale * p.k_scale;
  checks.expect(factor <= kMaxScale, "softmax_scale * k_scale", factor, "at most ", kMaxScale);
  checks.expect(factor >= kMinScale || !(scaled || p.block_dtype == DType::kF16), "softmax_scale * k_scale", factor,
                "at least ", kMinScale);
  checks.expect(scaled || p.k_scale == 1, "k_scale", p.k_scale, "1 for a ", cache, " cache");
  checks.expect(scaled || p.v_scale == 1, "v_scale", p.v_scale, "1 for a ", cache, " cache");
  checks.positive("output_scale", p.out_scale);
  checks.positive("1 / output_scale", 1 / p.out_scale);
  checks.expect(p.out_dtype == DType::kF8E4M3 || p.out_scale == 1, "output_scale", p.out_scale, "1 for a ", block,
                " output");
}

}  // namespace

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return "float16";
    case DType::kBF16:
      return "bfloat16";
    case DType::kF8E4M3:
      return "float8_e4m3fn";
  }
  return "an unknown dtype";
}

Problem check_sizes(const Params& p) {
  Checks checks;
  checks.range("batch", p.batch, 0, kMaxBatch);
  checks.range("block", p.block, 1, kMaxBlock);
  check_heads(checks, p);
  checks.at_least("slots", p.slots, 1);
  checks.at_least("layers", p.layers, 1);
  checks.range("layer", p.layer, 0, int64_t{p.layers} - 1);
  checks.at_least("max_pages", p.max_pages, 1);
  checks.at_least("sliding_window", p.sliding_window, 0);
  checks.range("causal", p.causal, 0, 1);
  checks.positive("rms_norm_eps", p.rms_norm_eps);
  checks.positive("softmax_scale", p.softmax_scale);
  check_dtypes(checks, p);
  return checks.result();
}

Problem check_params(const Params& p) {
  Problem problem = check_sizes(p);
  if (problem || p.batch == 0) return problem;  // empty tensors may be null
  Checks checks;
  checks.tensor("qkv", p.qkv, kAlignment);  // head_dim is a multiple of 16 bytes, so every head's row is aligned, too
  if (p.qkv_bias != nullptr) checks.tensor("qkv_bias", p.qkv_bias, kAlignment);
  checks.tensor("q_norm", p.q_norm, kAlignment);
  checks.tensor("k_norm", p.k_norm, kAlignment);
  checks.tensor("rope", p.rope, kAlignment);
  checks.tensor("context_pointers", p.context_pointers, kAlignment);
  checks.tensor("context_layout", p.context_layout, kAlignment);
  checks.tensor("page_table", p.page_table, alignof(int32_t));
  checks.tensor("slot_ids", p.slot_ids, alignof(int32_t));
  checks.tensor("context_lengths", p.context_lengths, alignof(int32_t));
  if (p.sinks != nullptr) checks.tensor("sinks", p.sinks, alignof(float));
  checks.tensor("out", p.out, kAlignment);
  return checks.result();
}

Problem check_gpu(bool fp8_cache, int32_t compute_capability) {
  if (!fp8_cache || compute_capability == 0 || compute_capability >= kFirstFp8) return std::nullopt;
  return text("fp8_cache: expected a GPU of compute capability ", kFirstFp8 / 10, ".", kFirstFp8 % 10,
              " or newer, found ", compute_capability / 10, ".", compute_capability % 10,
              "; to build for another GPU, hide this one: CUDA_VISIBLE_DEVICES=");
}

Problem check_requests(const Params& p, int64_t page_size, const int32_t* slot_ids, const int32_t* context_lengths) {
  const int64_t longest = std::min<int64_t>(kMaxContext, p.max_pages * page_size);
  for (int32_t b = 0; b < p.batch; ++b) {
    Checks checks;
    checks.range("slot id", slot_ids[b], 0, int64_t{p.slots} - 1);
    checks.range("context length", context_lengths[b], 0, longest);
    if (const Problem problem = checks.result()) return text("request ", b, ", ", *problem);
  }
  return std::nullopt;
}

Problem check_workspace(const Params& p) {
  const size_t needed = workspace_size(p);
  if (needed == 0) return std::nullopt;
  Checks checks;
  checks.tensor("workspace", p.workspace, kAlignment);
  checks.expect(p.workspace_bytes >= needed, "workspace", p.workspace_bytes, "at least ", needed, " bytes");
  return checks.result();
}

}  // namespace dflash::kv_injection
