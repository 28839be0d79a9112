// SPDX-License-Identifier: Apache-2.0
// How every kernel here is launched.
#pragma once

#include <cuda_runtime_api.h>

#include "kv_injection_attention/kernel/launch_config.h"

namespace dflash::kv_injection {

// The kernel may start before the one before it on the stream has ended, for whose results it waits on the device.
template <class... Arguments>
cudaError_t start(void (*kernel)(Arguments...), const Grid& grid, void* stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace dflash::kv_injection
