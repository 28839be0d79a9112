// SPDX-License-Identifier: Apache-2.0
// Names that TensorRT's registry looks up, and facts about the library. kernel.h and append.h declare other exports.
#include "common/export.h"
#include "kv_injection_attention/creator.h"
#include "kv_injection_attention/kernel.h"
#include "tensorrt_abi/nvinfer.h"

DFLASH_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
  static dflash::kv_injection::AttentionCreator attention;
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&attention};
  count = 1;
  return creators;
}

// Messages go to stderr (see common/guard.h), so the finder is not stored.
DFLASH_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder*) {}

const char* dflash::kv_injection::dflash_cuda_architectures() { return DFLASH_CUDA_ARCHITECTURES; }

// SHA-256 of the library's host code (see CMakeLists.txt).
DFLASH_EXPORT const char dflash_host_code[] = DFLASH_HOST_CODE;
