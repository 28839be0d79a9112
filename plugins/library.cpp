// SPDX-License-Identifier: Apache-2.0
// The library's only exports. TensorRT's registry looks up two of them by name, dflash_trt the third.
#include "kv_injection_attention/creator.h"
#include "tensorrt_abi/nvinfer.h"

#define DFLASH_EXPORT extern "C" __attribute__((visibility("default")))

DFLASH_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static dflash::kv_injection::AttentionCreator attention;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&attention};
  count = 1;
  return creators;
}

// Messages go to stderr (see common/guard.h), so the finder is not stored.
DFLASH_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

// SHA-256 of the library's host code (see CMakeLists.txt).
DFLASH_EXPORT const char dflash_host_code[] = DFLASH_HOST_CODE;
