// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/kernel/append.cuh"

#include <cuda_runtime_api.h>

#include "kv_injection_attention/kernel/start.cuh"

namespace dflash::kv_injection {

const char* dflash_launch_append(const AppendParams& p) {
  if (p.rows == 0) return nullptr;
  const Gpu* gpu = nullptr;
  cudaError_t error = current_gpu(gpu);
  if (error == cudaSuccess) error = start(append, *gpu, append_grid(p), p.stream, p);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, which the caller gets from us
  return cudaGetErrorString(error);
}

}  // namespace dflash::kv_injection
