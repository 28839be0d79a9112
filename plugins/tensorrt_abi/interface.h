// SPDX-License-Identifier: Apache-2.0
// The part of TensorRT's binary interface (ABI) that a V3 plugin needs, for machines without the SDK.
//
// Names, values and the order of members and virtual functions are those of NvInferRuntime.h. The virtual tables of
// AttentionPlugin and AttentionCreator and a compiled call of IExprBuilder were compared with the headers of 10.13.3,
// 10.14, 10.16, 11.0 and 11.1 and are identical. Nothing here is a symbol of libnvinfer.
#pragma once

#include <cstddef>
#include <cstdint>

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace nvinfer1 {

enum class DataType : int32_t {
  kFLOAT = 0,
  kHALF = 1,
  kINT8 = 2,
  kINT32 = 3,
  kBOOL = 4,
  kUINT8 = 5,
  kFP8 = 6,
  kBF16 = 7,
  kINT64 = 8,
  kINT4 = 9,
};
enum class TensorFormat : int32_t { kLINEAR = 0 };
enum class TensorRTPhase : int32_t { kBUILD = 0, kRUNTIME = 1 };
enum class PluginCapabilityType : int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };
enum class PluginFieldType : int32_t {
  kFLOAT16 = 0,
  kFLOAT32 = 1,
  kFLOAT64 = 2,
  kINT8 = 3,
  kINT16 = 4,
  kINT32 = 5,
  kCHAR = 6,
  kDIMS = 7,
  kUNKNOWN = 8,
  kBF16 = 9,
  kINT64 = 10,
  kFP8 = 11,
};
enum class APILanguage : int32_t { kCPP = 0, kPYTHON = 1 };

struct Dims64 {
  static constexpr int32_t MAX_DIMS = 8;
  int32_t nbDims;
  int64_t d[MAX_DIMS];
};
using Dims = Dims64;

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;  // -1 for a dimension that the profile leaves open
  Dims min, max, opt;
};

class IDimensionExpr;
class IPluginResourceContext;
class ILoggerFinder;

namespace apiv {

class VExprBuilder {
 public:
  virtual ~VExprBuilder() noexcept = default;
  virtual const IDimensionExpr* constant(int64_t value) = 0;  // more functions follow
};

}  // namespace apiv

// Created by TensorRT. Its virtual table holds only destructors; mImpl, which follows it, does the work.
class IExprBuilder {
 public:
  const IDimensionExpr* constant(int64_t value) noexcept { return mImpl->constant(value); }

 protected:
  apiv::VExprBuilder* mImpl;
  virtual ~IExprBuilder() noexcept = default;
};

struct DimsExprs {
  int32_t nbDims;
  const IDimensionExpr* d[Dims::MAX_DIMS];
};

struct PluginField {
  const char* name;
  const void* data;
  PluginFieldType type;
  int32_t length;
};

struct PluginFieldCollection {
  int32_t nbFields;
  const PluginField* fields;
};

struct InterfaceInfo {
  const char* kind;
  int32_t major, minor;
};

class IVersionedInterface {
 public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default;
};

inline namespace v_1_0 {

class IPluginCapability : public IVersionedInterface {};
class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual const char* getPluginName() const noexcept = 0;
  virtual const char* getPluginVersion() const noexcept = 0;
  virtual const char* getPluginNamespace() const noexcept = 0;
};

class IPluginV3OneBuild : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
  virtual int32_t configurePlugin(const DynamicPluginTensorDesc* in, int32_t nbInputs,
                                  const DynamicPluginTensorDesc* out, int32_t nbOutputs) noexcept = 0;
  virtual int32_t getOutputDataTypes(DataType* outputTypes, int32_t nbOutputs, const DataType* inputTypes,
                                     int32_t nbInputs) const noexcept = 0;
  virtual int32_t getOutputShapes(const DimsExprs* inputs, int32_t nbInputs, const DimsExprs* shapeInputs,
                                  int32_t nbShapeInputs, DimsExprs* outputs, int32_t nbOutputs,
                                  IExprBuilder& exprBuilder) noexcept = 0;
  virtual bool supportsFormatCombination(int32_t pos, const DynamicPluginTensorDesc* inOut, int32_t nbInputs,
                                         int32_t nbOutputs) noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize(const DynamicPluginTensorDesc*, int32_t, const DynamicPluginTensorDesc*,
                                  int32_t) const noexcept {
    return 0;
  }
  virtual int32_t getValidTactics(int32_t*, int32_t) noexcept { return 0; }
  virtual int32_t getNbTactics() noexcept { return 0; }
  virtual const char* getTimingCacheID() noexcept { return nullptr; }
  virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
  virtual const char* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
  virtual int32_t setTactic(int32_t) noexcept { return 0; }
  virtual int32_t onShapeChange(const PluginTensorDesc* in, int32_t nbInputs, const PluginTensorDesc* out,
                                int32_t nbOutputs) noexcept = 0;
  virtual int32_t enqueue(const PluginTensorDesc* inputDesc, const PluginTensorDesc* outputDesc,
                          const void* const* inputs, void* const* outputs, void* workspace,
                          cudaStream_t stream) noexcept = 0;
  virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
  virtual const PluginFieldCollection* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
  virtual IPluginV3* createPlugin(const char* name, const PluginFieldCollection* fields,
                                  TensorRTPhase phase) noexcept = 0;
  virtual const PluginFieldCollection* getFieldNames() noexcept = 0;
  virtual const char* getPluginName() const noexcept = 0;
  virtual const char* getPluginVersion() const noexcept = 0;
  virtual const char* getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0
}  // namespace nvinfer1
