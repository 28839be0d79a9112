// SPDX-License-Identifier: Apache-2.0
// TensorRT's plugin interface: the SDK's headers if TENSORRT_ROOT was given, else our own.
#pragma once

#include <cstddef>

#if DFLASH_TENSORRT_SDK
#include <NvInferRuntime.h>
#else
#include "tensorrt_abi/interface.h"
#endif

// These offsets are the same in TensorRT 10.13 to 11.x, so one binary serves all of them.
static_assert(sizeof(void*) == 8);
static_assert(sizeof(nvinfer1::Dims64) == 72 && offsetof(nvinfer1::Dims64, d) == 8);
static_assert(sizeof(nvinfer1::PluginTensorDesc) == 88);
static_assert(offsetof(nvinfer1::PluginTensorDesc, type) == 72);
static_assert(offsetof(nvinfer1::PluginTensorDesc, format) == 76);
static_assert(offsetof(nvinfer1::PluginTensorDesc, scale) == 80);
static_assert(sizeof(nvinfer1::DynamicPluginTensorDesc) == 304);
static_assert(offsetof(nvinfer1::DynamicPluginTensorDesc, min) == 88);
static_assert(offsetof(nvinfer1::DynamicPluginTensorDesc, max) == 160);
static_assert(offsetof(nvinfer1::DynamicPluginTensorDesc, opt) == 232);
static_assert(sizeof(nvinfer1::DimsExprs) == 72 && offsetof(nvinfer1::DimsExprs, d) == 8);
static_assert(sizeof(nvinfer1::PluginField) == 24);
static_assert(offsetof(nvinfer1::PluginField, data) == 8);
static_assert(offsetof(nvinfer1::PluginField, type) == 16);
static_assert(offsetof(nvinfer1::PluginField, length) == 20);
static_assert(sizeof(nvinfer1::PluginFieldCollection) == 16);
static_assert(offsetof(nvinfer1::PluginFieldCollection, fields) == 8);
static_assert(sizeof(nvinfer1::InterfaceInfo) == 16);
static_assert(static_cast<int>(nvinfer1::DataType::kFLOAT) == 0);
static_assert(static_cast<int>(nvinfer1::DataType::kHALF) == 1);
static_assert(static_cast<int>(nvinfer1::DataType::kINT32) == 3);
static_assert(static_cast<int>(nvinfer1::DataType::kFP8) == 6);
static_assert(static_cast<int>(nvinfer1::DataType::kBF16) == 7);
static_assert(static_cast<int>(nvinfer1::TensorFormat::kLINEAR) == 0);
static_assert(static_cast<int>(nvinfer1::PluginFieldType::kFLOAT32) == 1);
static_assert(static_cast<int>(nvinfer1::PluginFieldType::kINT32) == 5);
static_assert(static_cast<int>(nvinfer1::TensorRTPhase::kRUNTIME) == 1);
static_assert(static_cast<int>(nvinfer1::PluginCapabilityType::kRUNTIME) == 2);
