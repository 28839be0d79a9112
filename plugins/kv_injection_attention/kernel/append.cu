// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/kernel/append.cuh"

#include <cuda_runtime_api.h>

#include "kv_injection_attention/kernel/start.cuh"

namespace dflash::kv_injection {

const char* launch_append(const AppendParams& p) {
  if (p.rows == 0) return nullptr;
  const cudaError_t error = start(append, append_grid(p), p.stream, p);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // clears the error, which the caller gets from us
  return cudaGetErrorString(error);
}

}  // namespace dflash::kv_injection
