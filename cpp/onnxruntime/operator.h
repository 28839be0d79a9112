// SPDX-License-Identifier: Apache-2.0
// Shared by the operators: reads tensors and attributes through ONNX Runtime's C API and returns errors to it.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "onnxruntime/abi.h"

namespace dflash::ort {

extern const CustomOp kAttentionOperator;
extern const CustomOp kLinearOperator;

// An error of ONNX Runtime, to be passed back to it.
struct Failure {
  Status* status;
};

inline void check(Status* status) {
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
  } catch (...) {
    return api.create_status(kFail, "an exception that is no std::exception");
  }
}

struct TensorView {
  void* data = nullptr;  // null for a missing optional input
  std::vector<int64_t> dims;
};

inline TensorView input(const Api& api, const KernelContext* context, size_t index) {
  const Value* value = nullptr;
  check(api.input(context, index, &value));
  if (value == nullptr) return {};
  TensorInfo* info = nullptr;
  check(api.tensor_info(value, &info));
  const std::unique_ptr<TensorInfo, void (*)(TensorInfo*)> owner(info, api.at<void (*)(TensorInfo*)>(99));
  TensorView tensor;
  size_t rank = 0;
  check(api.num_dims(info, &rank));
  tensor.dims.resize(rank);
  check(api.dims(info, tensor.dims.data(), rank));
  check(api.data(const_cast<Value*>(value), &tensor.data));
  return tensor;
}

// The first output, FLOAT.
inline float* output(const Api& api, KernelContext* context, const std::vector<int64_t>& dims) {
  Value* value = nullptr;
  void* data = nullptr;
  check(api.output(context, 0, dims.data(), dims.size(), &value));
  check(api.data(value, &data));
  return static_cast<float*>(data);
}

template <class Number>
Number attribute(const Api& api, const KernelInfo* info, const char* name) {
  Number value = 0;
  check(api.attribute(info, name, &value));
  return value;
}

// A short string attribute. Throws Failure if it is missing.
inline std::string text(const Api& api, const KernelInfo* info, const char* name) {
  char value[16] = {};
  size_t size = sizeof value;
  check(api.attribute(info, name, value, &size));
  return value;
}

// Attribute instruction_set, which only tests set; "best" by default.
inline Isa instruction_set(const Api& api, const KernelInfo* info) {
  std::string name = "best";
  try {
    name = text(api, info, "instruction_set");
  } catch (const Failure& failure) {
    api.release(failure.status);
  }
  return isa_named(name);
}

// Runs work(i) for i in [0, count) on the session's threads. An exception is rethrown here, because none may cross ONNX
// Runtime.
template <class Work>
void parallel_for(const Api& api, const KernelContext* context, int64_t count, const Work& work) {
  struct Shared {
    const Work& work;
    std::atomic<bool> failed{false};
    std::exception_ptr error{};
  } shared{work};
  const auto one = [](void* data, size_t i) noexcept {
    auto& shared = *static_cast<Shared*>(data);
    try {
      if (!shared.failed) shared.work(static_cast<int64_t>(i));
    } catch (...) {
      if (!shared.failed.exchange(true)) shared.error = std::current_exception();
    }
  };
  check(api.parallel_for(context, one, count, &shared));
  if (shared.error) std::rethrow_exception(shared.error);
}

// Throws std::invalid_argument unless `holds`.
inline void expect(bool holds, const char* name, const char* text) {
  if (!holds) throw std::invalid_argument(std::string(name) + ": expected " + text);
}

template <class Kernel>
constexpr CustomOp make_operator() {
  return {
      .version = kCustomOpVersion,
      .create_kernel = nullptr,
      .name = [](const CustomOp*) { return Kernel::kName; },
      .execution_provider = [](const CustomOp*) -> const char* { return nullptr; },  // on the CPU provider
      .input_type = [](const CustomOp*, size_t i) { return Kernel::input_type(i); },
      .num_inputs = [](const CustomOp*) { return Kernel::kNumInputs; },
      .output_type = [](const CustomOp*, size_t) { return kFloat; },
      .num_outputs = [](const CustomOp*) -> size_t { return 1; },
      .compute = nullptr,
      .destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); },
      // The last input is optional.
      .input_characteristic = [](const CustomOp*,
                                 size_t i) { return i + 1 == Kernel::kNumInputs ? kOptional : kRequired; },
      .output_characteristic = [](const CustomOp*, size_t) { return kRequired; },
      .input_memory = [](const CustomOp*, size_t) { return 0; },
      .variadic_input_min_arity = nullptr,
      .variadic_input_homogeneity = nullptr,
      .variadic_output_min_arity = nullptr,
      .variadic_output_homogeneity = nullptr,
      .create_kernel_v2 = [](const CustomOp*, const Api* api, const KernelInfo* info,
                             void** kernel) { return guarded(*api, [&] { *kernel = new Kernel(*api, info); }); },
      .compute_v2 =
          [](void* kernel, KernelContext* context) {
            const auto& self = *static_cast<const Kernel*>(kernel);
            return guarded(self.api, [&] { self.compute(context); });
          },
  };
}

}  // namespace dflash::ort
