// SPDX-License-Identifier: Apache-2.0
// The current GPU, as a launch sees it.
#pragma once

#include <cuda_runtime_api.h>

namespace dflash::kv_injection {

// Properties of a GPU that launches depend on.
struct Gpu {
  int sms;
  int sm_bytes, reserved_bytes, cta_bytes;  // shared memory: per SM, reserved per CTA, maximum per CTA
  int major, minor;                         // compute capability
  bool starts_early;  // whether its kernels wait on the device for the preceding kernel of the stream

  int compute_capability() const { return 10 * major + minor; }
};

// Points `gpu` to the current device's properties, which are read once per device.
cudaError_t current_gpu(const Gpu*& gpu);

}  // namespace dflash::kv_injection
