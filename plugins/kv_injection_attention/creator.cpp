// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/creator.h"

#include "common/guard.h"

namespace dflash::kv_injection {

nvinfer1::IPluginV3* AttentionCreator::createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                                    nvinfer1::TensorRTPhase phase) noexcept {
  const char* layer = name != nullptr && *name != '\0' ? name : kPluginName;
  return guard(layer, static_cast<AttentionPlugin*>(nullptr),
               [&] { return new AttentionPlugin(parse_fields(fields, phase)); });
}

const nvinfer1::PluginFieldCollection* AttentionCreator::getFieldNames() noexcept { return &attribute_names(); }

}  // namespace dflash::kv_injection
