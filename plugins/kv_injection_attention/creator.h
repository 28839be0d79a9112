// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kv_injection_attention/plugin.h"

namespace dflash::kv_injection {

// Creates plugins from a node's attributes or from a serialised engine.
class AttentionCreator final : public nvinfer1::IPluginCreatorV3One {
 public:
  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override;
  const char* getPluginName() const noexcept override { return kPluginName; }
  const char* getPluginVersion() const noexcept override { return kPluginVersion; }
  const char* getPluginNamespace() const noexcept override { return kPluginNamespace; }
};

}  // namespace dflash::kv_injection
