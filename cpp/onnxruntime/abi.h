// SPDX-License-Identifier: Apache-2.0
// The part of ONNX Runtime's C API that a custom operator needs, so that its headers need not be installed.
//
// OrtApi is a table of function pointers that only grows, and OrtCustomOp a struct with a version, so this works with
// every release since 1.17 (onnxruntime_c_api.h, MIT licence, API versions 17 to 29). ONNX Runtime's wheels do not
// contain the header; tests/cpp/test_onnxruntime_abi.py checks the installed library.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::ort {

inline constexpr uint32_t kApiVersion = 17;       // first version with KernelContext_ParallelFor
inline constexpr uint32_t kCustomOpVersion = 16;  // CreateKernelV2 and KernelComputeV2, which can return errors

struct Status;
struct SessionOptions;
struct Domain;
struct KernelInfo;
struct KernelContext;
struct Value;
struct TensorInfo;

enum ElementType : int { kFloat = 1, kUint8 = 2, kInt32 = 6 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };

// Functions by their index in OrtApi.
struct Api {
  const void* functions[275];  // version 17 has 276 functions

  template <class Function>
  Function at(size_t index) const {
    return reinterpret_cast<Function>(const_cast<void*>(functions[index]));
  }
  Status* create_status(ErrorCode code, const char* text) const {
    return at<Status* (*)(ErrorCode, const char*)>(0)(code, text);
  }
  Status* create_domain(const char* name, Domain** out) const {
    return at<Status* (*)(const char*, Domain**)>(26)(name, out);
  }
  Status* add_operator(Domain* domain, const struct CustomOp* op) const {
    return at<Status* (*)(Domain*, const CustomOp*)>(27)(domain, op);
  }
  Status* add_domain(SessionOptions* options, Domain* domain) const {
    return at<Status* (*)(SessionOptions*, Domain*)>(28)(options, domain);
  }
  Status* data(Value* value, void** out) const { return at<Status* (*)(Value*, void**)>(51)(value, out); }
  Status* num_dims(const TensorInfo* info, size_t* out) const {
    return at<Status* (*)(const TensorInfo*, size_t*)>(61)(info, out);
  }
  Status* dims(const TensorInfo* info, int64_t* out, size_t count) const {
    return at<Status* (*)(const TensorInfo*, int64_t*, size_t)>(62)(info, out, count);
  }
  Status* tensor_info(const Value* value, TensorInfo** out) const {
    return at<Status* (*)(const Value*, TensorInfo**)>(65)(value, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, float* out) const {
    return at<Status* (*)(const KernelInfo*, const char*, float*)>(85)(info, name, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* out) const {
    return at<Status* (*)(const KernelInfo*, const char*, int64_t*)>(86)(info, name, out);
  }
  Status* attribute(const KernelInfo* info, const char* name, char* out, size_t* size) const {
    return at<Status* (*)(const KernelInfo*, const char*, char*, size_t*)>(87)(info, name, out, size);
  }
  Status* input(const KernelContext* context, size_t index, const Value** out) const {
    return at<Status* (*)(const KernelContext*, size_t, const Value**)>(90)(context, index, out);
  }
  Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t count, Value** out) const {
    return at<Status* (*)(KernelContext*, size_t, const int64_t*, size_t, Value**)>(91)(context, index, dims, count,
                                                                                        out);
  }
  void release(Status* status) const { at<void (*)(Status*)>(93)(status); }
  void release(TensorInfo* info) const { at<void (*)(TensorInfo*)>(99)(info); }
  // Runs work(data, i) for i in [0, count) on the session's own threads.
  Status* parallel_for(const KernelContext* context, void (*work)(void*, size_t), size_t count, void* data) const {
    return at<Status* (*)(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>(274)(context, work,
                                                                                                      count, 0, data);
  }
};

struct ApiBase {
  const Api* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

// An operator. ONNX Runtime reads the members of version 16 only.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*execution_provider)(const CustomOp*);
  ElementType (*input_type)(const CustomOp*, size_t index);
  size_t (*num_inputs)(const CustomOp*);
  ElementType (*output_type)(const CustomOp*, size_t index);
  size_t (*num_outputs)(const CustomOp*);
  void (*compute)(void* kernel, KernelContext*);
  void (*destroy)(void* kernel);
  Characteristic (*input_characteristic)(const CustomOp*, size_t index);
  Characteristic (*output_characteristic)(const CustomOp*, size_t index);
  int (*input_memory)(const CustomOp*, size_t index);
  int (*variadic_input_min_arity)(const CustomOp*);
  int (*variadic_input_homogeneity)(const CustomOp*);
  int (*variadic_output_min_arity)(const CustomOp*);
  int (*variadic_output_homogeneity)(const CustomOp*);
  Status* (*create_kernel_v2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*compute_v2)(void* kernel, KernelContext*);
};

static_assert(offsetof(CustomOp, create_kernel) == 8 && offsetof(CustomOp, compute) == 64);
static_assert(offsetof(CustomOp, input_characteristic) == 80 && offsetof(CustomOp, input_memory) == 96);
static_assert(sizeof(CustomOp) == 152 && sizeof(Api) == 275 * sizeof(void*) && sizeof(ApiBase) == 16);
static_assert(offsetof(CustomOp, create_kernel_v2) == 136 && offsetof(CustomOp, compute_v2) == 144);

}  // namespace dflash::ort
