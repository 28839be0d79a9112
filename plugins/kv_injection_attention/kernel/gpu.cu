// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/kernel/gpu.cuh"

#include <map>
#include <mutex>

#include "kv_injection_attention/kernel/architecture.h"

namespace dflash::kv_injection {
namespace {

// Compiled for the same architectures as every kernel, to ask which of them the driver chose: PTX may be for an older
// one than the GPU's.
__global__ void chosen_code() {}

cudaError_t read_gpu(int device, Gpu& gpu) {
  cudaError_t error = cudaSuccess;
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
  };
  get(gpu.sms, cudaDevAttrMultiProcessorCount);
  get(gpu.sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  get(gpu.reserved_bytes, cudaDevAttrReservedSharedMemoryPerBlock);
  get(gpu.cta_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(gpu.major, cudaDevAttrComputeCapabilityMajor);
  get(gpu.minor, cudaDevAttrComputeCapabilityMinor);
  cudaFuncAttributes code{};
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&code, chosen_code);
  gpu.starts_early = code.ptxVersion >= kFirstDependentLaunch;
  return error;
}

}  // namespace

cudaError_t current_gpu(const Gpu*& gpu) {
  static std::mutex mutex;
  static std::map<int, Gpu> gpus;  // pointers to its elements stay valid
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  const std::lock_guard lock(mutex);
  auto found = gpus.find(device);
  if (found == gpus.end()) {
    Gpu read{};
    error = read_gpu(device, read);
    if (error != cudaSuccess) return error;
    found = gpus.emplace(device, read).first;
  }
  gpu = &found->second;
  return cudaSuccess;
}

}  // namespace dflash::kv_injection
