// SPDX-License-Identifier: Apache-2.0
// DFlashKVInjectionAttention as an operator of ONNX Runtime's CPU provider. `_C` is the library of custom operators:
// SessionOptions.register_custom_ops_library calls RegisterCustomOps.
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "block_attention/block_attention.h"
#include "onnxruntime/abi.h"

namespace dflash::ort {
namespace {

constexpr const char* kName = "DFlashKVInjectionAttention";
constexpr const char* kDomain = "dflash_trt";
constexpr size_t kNumInputs = 9;  // the ninth, sinks, may be missing
constexpr size_t kSlotIds = 6, kContextLengths = 7, kSinks = 8;

// What failed inside ONNX Runtime, to be given back to it.
struct Failure {
  Status* status;
};

void check(Status* status) {
  if (status != nullptr) throw Failure{status};
}

Status* guarded(const Api& api, auto&& work) noexcept {
  try {
    work();
    return nullptr;
  } catch (const Failure& failure) {
    return failure.status;
  } catch (const std::invalid_argument& error) {
    return api.create_status(kInvalidArgument, error.what());
  } catch (const std::exception& error) {
    return api.create_status(kFail, error.what());
  }
}

struct Tensor {
  void* data = nullptr;
  std::vector<int64_t> dims;
};

Tensor input(const Api& api, const KernelContext* context, size_t index) {
  const Value* value = nullptr;
  check(api.input(context, index, &value));
  if (value == nullptr) return {};
  TensorInfo* info = nullptr;
  check(api.tensor_info(value, &info));
  const std::unique_ptr<TensorInfo, void (*)(TensorInfo*)> owner(info, api.at<void (*)(TensorInfo*)>(99));
  Tensor tensor;
  size_t rank = 0;
  check(api.num_dims(info, &rank));
  tensor.dims.resize(rank);
  check(api.dims(info, tensor.dims.data(), rank));
  check(api.data(const_cast<Value*>(value), &tensor.data));
  return tensor;
}

int64_t integer(const Api& api, const KernelInfo* info, const char* name) {
  int64_t value = 0;
  check(api.attribute(info, name, &value));
  return value;
}

float number(const Api& api, const KernelInfo* info, const char* name) {
  float value = 0;
  check(api.attribute(info, name, &value));
  return value;
}

// Attribute instruction_set, which tests give; "best" where there is none.
Isa instruction_set(const Api& api, const KernelInfo* info) {
  char name[16] = {};
  size_t size = sizeof name;
  if (Status* status = api.attribute(info, "instruction_set", name, &size)) {
    api.release(status);
    return isa_named("best");
  }
  return isa_named(name);
}

class AttentionKernel {
 public:
  AttentionKernel(const Api& api, const KernelInfo* info) : api(api), attend_(attend_head(instruction_set(api, info))) {
    attributes_.layer = integer(api, info, "layer");
    attributes_.num_heads = integer(api, info, "num_heads");
    attributes_.num_kv_heads = integer(api, info, "num_kv_heads");
    attributes_.head_dim = integer(api, info, "head_dim");
    attributes_.sliding_window = integer(api, info, "sliding_window");
    attributes_.causal = integer(api, info, "causal") != 0;
    attributes_.rms_norm_eps = number(api, info, "rms_norm_eps");
    attributes_.softmax_scale = number(api, info, "softmax_scale");
  }

  void compute(KernelContext* context) const {
    std::vector<Tensor> inputs;
    for (size_t i = 0; i < kNumInputs; ++i) inputs.push_back(input(api, context, i));
    BlockAttention attention = sizes(inputs);
    const int64_t dims[] = {attention.batch, attention.block, attention.num_heads * attention.head_dim};
    Value* out = nullptr;
    check(api.output(context, 0, dims, 3, &out));
    check(api.data(out, reinterpret_cast<void**>(&attention.out)));

    struct Work {
      const BlockAttention& attention;
      AttendHead attend;
    } work{attention, attend_};
    const auto one = [](void* data, size_t i) {
      const Work& work = *static_cast<Work*>(data);
      const int64_t heads = work.attention.num_kv_heads;
      work.attend(work.attention, static_cast<int64_t>(i) / heads, static_cast<int64_t>(i) % heads);
    };
    check(api.parallel_for(context, one, attention.batch * attention.num_kv_heads, &work));
  }

  const Api& api;

 private:
  // The attributes with the sizes and addresses of a call. Throws std::invalid_argument for what does not fit.
  BlockAttention sizes(const std::vector<Tensor>& inputs) const {
    BlockAttention a = attributes_;
    const auto expect = [](bool holds, const char* text) {
      if (!holds) throw std::invalid_argument(std::string(kName) + ": expected " + text);
    };
    const std::vector<int64_t>&qkv = inputs[0].dims, &cache = inputs[4].dims, &pages = inputs[kSlotIds].dims;
    expect(qkv.size() == 3 && qkv[2] == (a.num_heads + 2 * a.num_kv_heads) * a.head_dim, "qkv [B, S, (N + 2G)*D]");
    a.batch = qkv[0];
    a.block = qkv[1];
    const std::vector<int64_t> norm{a.head_dim}, rope{a.batch, a.block, a.head_dim}, heads{a.num_heads};
    expect(inputs[1].dims == norm && inputs[2].dims == norm, "q_norm and k_norm [D]");
    expect(inputs[3].dims == rope, "rope [B, S, D]");
    expect(cache.size() == 5 && cache[3] == a.num_kv_heads && cache[4] == a.head_dim, "k_cache [P, L, R, G, D]");
    expect(inputs[5].dims == cache, "v_cache of k_cache's shape");
    expect((pages.size() == 1 || pages.size() == 2) && pages[0] == a.batch, "slot_ids [B] or [B, M]");
    expect(inputs[kContextLengths].dims == std::vector<int64_t>{a.batch}, "context_lengths [B]");
    expect(inputs[kSinks].data == nullptr || inputs[kSinks].dims == heads, "sinks [N]");
    a.num_pages = cache[0];
    a.layers = cache[1];
    a.page_rows = cache[2];
    a.pages_per_row = pages.size() == 2 ? pages[1] : 1;
    const float** floats[] = {&a.qkv, &a.q_norm, &a.k_norm, &a.rope, &a.k_cache, &a.v_cache};
    for (size_t i = 0; i < std::size(floats); ++i) *floats[i] = static_cast<const float*>(inputs[i].data);
    a.page_table = static_cast<const int32_t*>(inputs[kSlotIds].data);
    a.context_lengths = static_cast<const int32_t*>(inputs[kContextLengths].data);
    a.sinks = static_cast<const float*>(inputs[kSinks].data);
    if (const char* text = problem(a)) throw std::invalid_argument(std::string(kName) + ": " + text);
    return a;
  }

  AttendHead attend_;
  BlockAttention attributes_{};
};

constexpr CustomOp kOperator{
    .version = kApiVersion,
    .create_kernel = nullptr,
    .name = [](const CustomOp*) { return kName; },
    .execution_provider = [](const CustomOp*) -> const char* { return nullptr; },  // the CPU's
    .input_type = [](const CustomOp*, size_t i) { return i == kSlotIds || i == kContextLengths ? kInt32 : kFloat; },
    .num_inputs = [](const CustomOp*) { return kNumInputs; },
    .output_type = [](const CustomOp*, size_t) { return kFloat; },
    .num_outputs = [](const CustomOp*) -> size_t { return 1; },
    .compute = nullptr,
    .destroy = [](void* kernel) { delete static_cast<AttentionKernel*>(kernel); },
    .input_characteristic = [](const CustomOp*, size_t i) { return i == kSinks ? kOptional : kRequired; },
    .output_characteristic = [](const CustomOp*, size_t) { return kRequired; },
    .input_memory = [](const CustomOp*, size_t) { return 0; },
    .variadic_input_min_arity = nullptr,
    .variadic_input_homogeneity = nullptr,
    .variadic_output_min_arity = nullptr,
    .variadic_output_homogeneity = nullptr,
    .create_kernel_v2 =
        [](const CustomOp*, const Api* api, const KernelInfo* info, void** kernel) {
          return guarded(*api, [&] { *kernel = new AttentionKernel(*api, info); });
        },
    .compute_v2 =
        [](void* kernel, KernelContext* context) {
          const auto& attention = *static_cast<const AttentionKernel*>(kernel);
          return guarded(attention.api, [&] { attention.compute(context); });
        },
};

}  // namespace
}  // namespace dflash::ort

// Its name and signature are ONNX Runtime's. Domains live as long as the process: sessions outlive their options.
extern "C" __attribute__((visibility("default"))) dflash::ort::Status* RegisterCustomOps(
    dflash::ort::SessionOptions* options, const dflash::ort::ApiBase* base) {
  using namespace dflash::ort;
  const Api* api = base->get_api(kApiVersion);
  static Domain* domain = nullptr;
  static Status* const failed = [&]() -> Status* {
    if (Status* status = api->create_domain(kDomain, &domain)) return status;
    return api->add_operator(domain, &kOperator);
  }();
  return failed != nullptr ? failed : api->add_domain(options, domain);
}
