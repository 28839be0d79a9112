// SPDX-License-Identifier: Apache-2.0
// Launches every kernel of the plugin.
#pragma once

#include <cuda_runtime_api.h>

#include "kv_injection_attention/kernel/gpu.cuh"
#include "kv_injection_attention/kernel/launch_config.h"

namespace dflash::kv_injection {

// A kernel may start early if it waits on the device for the preceding kernel of the stream.
template <class... Arguments>
cudaError_t start(void (*kernel)(Arguments...), const Gpu& gpu, const Grid& grid, void* stream,
                  const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = gpu.starts_early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace dflash::kv_injection
