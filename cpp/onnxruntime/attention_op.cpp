// SPDX-License-Identifier: Apache-2.0
// DFlashKVInjectionAttention as an operator for ONNX Runtime's CPU provider.
#include "block_attention/block_attention.h"
#include "onnxruntime/operator.h"

namespace dflash::ort {
namespace {

constexpr size_t kPageIds = 6, kContextLengths = 7, kSinks = 8;

class AttentionKernel {
 public:
  static constexpr const char* kName = "DFlashKVInjectionAttention";
  static constexpr size_t kNumInputs = 9;  // sinks is optional
  static constexpr ElementType input_type(size_t i) { return i == kPageIds || i == kContextLengths ? kInt32 : kFloat; }

  AttentionKernel(const Api& api, const KernelInfo* info) : api(api), attend_(attend_head(instruction_set(api, info))) {
    attributes_.layer = attribute<int64_t>(api, info, "layer");
    attributes_.num_heads = attribute<int64_t>(api, info, "num_heads");
    attributes_.num_kv_heads = attribute<int64_t>(api, info, "num_kv_heads");
    attributes_.head_dim = attribute<int64_t>(api, info, "head_dim");
    attributes_.sliding_window = attribute<int64_t>(api, info, "sliding_window");
    attributes_.causal = attribute<int64_t>(api, info, "causal") != 0;
    attributes_.rms_norm_eps = attribute<float>(api, info, "rms_norm_eps");
    attributes_.softmax_scale = attribute<float>(api, info, "softmax_scale");
  }

  void compute(KernelContext* context) const {
    std::vector<TensorView> inputs;
    for (size_t i = 0; i < kNumInputs; ++i) inputs.push_back(input(api, context, i));
    BlockAttention attention = sizes(inputs);
    std::vector<int64_t> dims = inputs[0].dims;
    dims.back() = attention.num_heads * attention.head_dim;
    attention.out = output(api, context, dims);
    parallel_for(api, context, attention.batch * attention.num_kv_heads,
                 [&](int64_t i) { attend_(attention, i / attention.num_kv_heads, i % attention.num_kv_heads); });
  }

  const Api& api;

 private:
  // The attributes with the sizes and addresses of a call. Throws std::invalid_argument if they do not match.
  BlockAttention sizes(const std::vector<TensorView>& inputs) const {
    BlockAttention a = attributes_;
    const auto expect = [](bool holds, const char* text) { ort::expect(holds, kName, text); };
    const std::vector<int64_t>&qkv = inputs[0].dims, &cache = inputs[4].dims, &pages = inputs[kPageIds].dims;
    const std::vector<int64_t>& rope = inputs[3].dims;
    expect(rope.size() == 3 && rope[2] == a.head_dim, "rope [B, S, D]");
    a.batch = rope[0];
    a.block = rope[1];
    const int64_t width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim;
    const std::vector<int64_t> apart{a.batch, a.block, width};
    const bool joined = qkv.size() == 2 && qkv[0] >= a.batch * a.block && qkv[1] == width;
    expect(joined || qkv == apart, "qkv [B*S or more, (N + 2G)*D] or [B, S, (N + 2G)*D]");
    const std::vector<int64_t> norm{a.head_dim}, heads{a.num_heads};
    expect(inputs[1].dims == norm && inputs[2].dims == norm, "q_norm and k_norm [D]");
    expect(cache.size() == 5 && cache[3] == a.num_kv_heads && cache[4] == a.head_dim, "k_cache [P, L, R, G, D]");
    expect(inputs[5].dims == cache, "v_cache of k_cache's shape");
    expect(pages.size() == 2 && pages[0] == a.batch, "page_ids [B, M]");
    expect(inputs[kContextLengths].dims == std::vector<int64_t>{a.batch}, "context_lengths [B]");
    expect(inputs[kSinks].data == nullptr || inputs[kSinks].dims == heads, "sinks [N]");
    a.num_pages = cache[0];
    a.layers = cache[1];
    a.page_rows = cache[2];
    a.pages_per_request = pages[1];
    const float** floats[] = {&a.qkv, &a.q_norm, &a.k_norm, &a.rope, &a.k_cache, &a.v_cache};
    for (size_t i = 0; i < std::size(floats); ++i) *floats[i] = static_cast<const float*>(inputs[i].data);
    a.page_ids = static_cast<const int32_t*>(inputs[kPageIds].data);
    a.context_lengths = static_cast<const int32_t*>(inputs[kContextLengths].data);
    a.sinks = static_cast<const float*>(inputs[kSinks].data);
    if (const char* text = problem(a)) throw std::invalid_argument(std::string(kName) + ": " + text);
    return a;
  }

  AttendHead attend_;
  BlockAttention attributes_{};
};

}  // namespace

const CustomOp kAttentionOperator = make_operator<AttentionKernel>();

}  // namespace dflash::ort
