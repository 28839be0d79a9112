// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <algorithm>

#include "kv_injection_attention/kernel.h"
#include "kv_injection_attention/kernel/plan.h"

namespace dflash::kv_injection {

template <int D>
cudaError_t launch_head_dim(const Params& params, const Plan& plan);  // head_dim_*.cu

namespace {

// CTAs that the current GPU holds at once, at most two an SM, each with `shared_bytes` of shared memory.
cudaError_t resident_ctas(int shared_bytes, int* ctas) {
  int device = 0, sms = 0, sm_bytes = 0, reserved = 0;
  cudaError_t error = cudaGetDevice(&device);
  const auto ask = [&](int* value, cudaDeviceAttr what) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, what, device);
  };
  ask(&sms, cudaDevAttrMultiProcessorCount);
  ask(&sm_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ask(&reserved, cudaDevAttrReservedSharedMemoryPerBlock);
  *ctas = sms * std::clamp(sm_bytes / (shared_bytes + reserved), 1, 2);
  return error;
}

cudaError_t launch_plan(const Params& p) {
  int ctas = 0;
  const cudaError_t error = resident_ctas(make_plan(p, 1).shared_bytes, &ctas);
  if (error != cudaSuccess) return error;
  const Plan plan = make_plan(p, ctas);
  switch (p.head_dim) {
    case 64: return launch_head_dim<64>(p, plan);
    case 96: return launch_head_dim<96>(p, plan);
    case 128: return launch_head_dim<128>(p, plan);
    case 256: return launch_head_dim<256>(p, plan);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

const char* launch(const Params& p) {
  if (p.batch == 0) return nullptr;
  const cudaError_t error = launch_plan(p);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // reported here, so not left behind for whoever asks next
  return cudaGetErrorString(error);
}

}  // namespace dflash::kv_injection
