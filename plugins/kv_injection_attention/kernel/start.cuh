// SPDX-License-Identifier: Apache-2.0
// How every kernel here is launched.
#pragma once

#include <cuda_runtime_api.h>

#include "kv_injection_attention/kernel/architecture.h"
#include "kv_injection_attention/kernel/launch_config.h"

namespace dflash::kv_injection {

// A kernel that waits on the device for the results of the one before it on the stream may start before that has ended.
// Whether it does is a fact of the code that the driver chose for this GPU, of which PTX may be older than the GPU.
template <class... Arguments>
cudaError_t start(void (*kernel)(Arguments...), const Grid& grid, void* stream, const Arguments&... arguments) {
  cudaFuncAttributes code{};
  const cudaError_t error = cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(kernel));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = code.ptxVersion >= kFirstDependentLaunch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace dflash::kv_injection
