// SPDX-License-Identifier: Apache-2.0
// The attention of plugins/kv_injection_attention: reference and kernel.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/kv_injection_call.h"
#include "kv_injection_attention/append.h"
#include "kv_injection_attention/check.h"
#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/reference.h"

namespace nb = nanobind;
namespace attention = dflash::kv_injection;

using Values = std::vector<int32_t>;

static void refuse(const attention::Problem& problem) {
  if (problem) throw std::invalid_argument(*problem);
}

static void compute_reference(const attention::Attributes& attributes, const Inputs& inputs, const Array& out) {
  const attention::Params params = call_params(attributes, inputs, out, nb::device::cpu::value);
  const nb::gil_scoped_release release;
  attention::reference(params);
}

static size_t workspace_bytes(const attention::Attributes& attributes, const Inputs& inputs, const Array& out) {
  const attention::Params params = call_params(attributes, inputs, out, out.device_type());
  refuse(check_sizes(params));
  return workspace_size(params);
}

static void check(const attention::Attributes& attributes, int32_t batch, int32_t block) {
  refuse(check_limits(attributes, batch, block));
}

struct NamedKernel {
  const char* name;
  attention::Kernel kernel;
};

static std::span<const NamedKernel> kernels() {
  static constexpr NamedKernel all[] = {{"best", attention::Kernel::kBest},
                                        {"mma", attention::Kernel::kMma},
                                        {"wgmma", attention::Kernel::kWgmma},
                                        {"short", attention::Kernel::kShort},
                                        {"ahead", attention::Kernel::kAhead}};
  return {all, attention::dflash_experimental_kernels() ? std::size(all) : 3};
}

static std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const NamedKernel& known : kernels()) names.emplace_back(known.name);
  return names;
}

static attention::Kernel kernel_named(const std::string& name) {
  std::string names;
  for (const NamedKernel& known : kernels()) {
    if (known.name == name) return known.kernel;
    names += names.empty() ? known.name : std::string(", ") + known.name;
  }
  throw std::invalid_argument("kernel: expected one of " + names + ", found " + name);
}

static void launch(const attention::Attributes& attributes, const Inputs& inputs, const Array& out,
                   const Array& workspace, uintptr_t stream, const std::optional<Values>& slot_ids,
                   const std::optional<Values>& context_lengths, const std::string& kernel) {
  const attention::Kernel chosen = kernel_named(kernel);
  attention::Params params = call_params(attributes, inputs, out, nb::device::cuda::value);
  params.workspace = workspace_address(workspace);
  params.workspace_bytes = workspace.nbytes();
  params.stream = reinterpret_cast<void*>(stream);
  refuse(check_params(params));
  refuse(check_workspace(params));
  if (slot_ids && context_lengths) {
    const auto batch = static_cast<size_t>(params.batch);
    if (slot_ids->size() != batch || context_lengths->size() != batch) {
      throw std::invalid_argument("host values: expected one for each of " + std::to_string(batch) + " requests");
    }
    // The page size is in GPU memory.
    const int64_t largest_page = params.max_pages == 1 ? attention::kMaxContext : attention::kMaxPageSize;
    refuse(check_requests(params, largest_page, slot_ids->data(), context_lengths->data()));
  }
  if (const char* error = attention::dflash_launch_attention(params, chosen)) throw std::runtime_error(error);
}

using Input = nb::ndarray<nb::ro>;

static void append_reference(const Input& kv, const Input& page_ids, const Input& offsets, const Array& k_cache,
                             const Array& v_cache) {
  const attention::AppendParams params =
      append_params({kv, page_ids, offsets}, k_cache, v_cache, nb::device::cpu::value);
  refuse(check_append(params));
  const nb::gil_scoped_release release;
  attention::append_reference(params);
}

static void append(const Input& kv, const Input& page_ids, const Input& offsets, const Array& k_cache,
                   const Array& v_cache, uintptr_t stream) {
  attention::AppendParams params = append_params({kv, page_ids, offsets}, k_cache, v_cache, nb::device::cuda::value);
  refuse(check_append(params));
  params.stream = reinterpret_cast<void*>(stream);
  if (const char* error = attention::dflash_launch_append(params)) throw std::runtime_error(error);
}

static std::vector<std::string> cuda_architectures() {
  std::istringstream words(attention::dflash_cuda_architectures());
  std::vector<std::string> names;
  for (std::string name; words >> name;) names.push_back(name);
  return names;
}

static void bind_attributes(nb::module_& module) {
  using attention::Attributes;
  nb::class_<Attributes>(module, "KVInjectionAttributes")
      .def(
          "__init__",
          [](Attributes* self, int32_t layer, int32_t num_heads, int32_t num_kv_heads, int32_t head_dim,
             float rms_norm_eps, float softmax_scale, int32_t sliding_window, int32_t causal, float k_scale,
             float v_scale, int32_t fp8_cache, int32_t has_qkv_bias, int32_t fp8_output, float output_scale) {
            new (self) Attributes{.layer = layer,
                                  .num_heads = num_heads,
                                  .num_kv_heads = num_kv_heads,
                                  .head_dim = head_dim,
                                  .rms_norm_eps = rms_norm_eps,
                                  .softmax_scale = softmax_scale,
                                  .sliding_window = sliding_window,
                                  .causal = causal,
                                  .k_scale = k_scale,
                                  .v_scale = v_scale,
                                  .fp8_cache = fp8_cache,
                                  .has_qkv_bias = has_qkv_bias,
                                  .fp8_output = fp8_output,
                                  .output_scale = output_scale};
          },
          nb::kw_only(), nb::arg("layer"), nb::arg("num_heads"), nb::arg("num_kv_heads"), nb::arg("head_dim"),
          nb::arg("rms_norm_eps"), nb::arg("softmax_scale"), nb::arg("sliding_window"), nb::arg("causal"),
          nb::arg("k_scale"), nb::arg("v_scale"), nb::arg("fp8_cache"), nb::arg("has_qkv_bias"), nb::arg("fp8_output"),
          nb::arg("output_scale"));
}

void bind_kv_injection(nb::module_& module) {
  bind_attributes(module);
  module.def("cuda_architectures", &cuda_architectures);
  module.def("kv_injection_attention_kernels", &kernel_names);
  module.def("kv_injection_attention_check", &check, nb::arg("attributes"), nb::arg("batch"), nb::arg("block"));
  module.def("kv_injection_attention_reference", &compute_reference, nb::arg("attributes"), nb::arg("inputs"),
             nb::arg("out"));
  module.def("kv_injection_attention_workspace_bytes", &workspace_bytes, nb::arg("attributes"), nb::arg("inputs"),
             nb::arg("out"));
  module.def("kv_injection_attention", &launch, nb::arg("attributes"), nb::arg("inputs"), nb::arg("out"),
             nb::arg("workspace"), nb::arg("stream"), nb::kw_only(), nb::arg("host_slot_ids") = nb::none(),
             nb::arg("host_context_lengths") = nb::none(), nb::arg("kernel") = "best");
  module.def("kv_injection_append_reference", &append_reference, nb::arg("kv"), nb::arg("page_ids"),
             nb::arg("offsets"), nb::arg("k_cache"), nb::arg("v_cache"));
  module.def("kv_injection_append", &append, nb::arg("kv"), nb::arg("page_ids"), nb::arg("offsets"),
             nb::arg("k_cache"), nb::arg("v_cache"), nb::arg("stream"));
}
