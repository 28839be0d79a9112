// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/fields.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "common/text.h"

namespace dflash::kv_injection {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::TensorRTPhase;

constexpr PluginFieldType kInt = PluginFieldType::kINT32, kFloat = PluginFieldType::kFLOAT32;
constexpr const char* kFormatVersionName = "format_version";

struct Attribute {
  const char* name;
  PluginFieldType type;
  size_t offset;
};

constexpr std::array<Attribute, kNumAttributes> kAttributes{{
    {"layer", kInt, offsetof(Attributes, layer)},
    {"num_heads", kInt, offsetof(Attributes, num_heads)},
    {"num_kv_heads", kInt, offsetof(Attributes, num_kv_heads)},
    {"head_dim", kInt, offsetof(Attributes, head_dim)},
    {"rms_norm_eps", kFloat, offsetof(Attributes, rms_norm_eps)},
    {"softmax_scale", kFloat, offsetof(Attributes, softmax_scale)},
    {"sliding_window", kInt, offsetof(Attributes, sliding_window)},
    {"causal", kInt, offsetof(Attributes, causal)},
    {"k_scale", kFloat, offsetof(Attributes, k_scale)},
    {"v_scale", kFloat, offsetof(Attributes, v_scale)},
    {"fp8_cache", kInt, offsetof(Attributes, fp8_cache)},
    {"has_qkv_bias", kInt, offsetof(Attributes, has_qkv_bias)},
    {"fp8_output", kInt, offsetof(Attributes, fp8_output)},
    {"output_scale", kFloat, offsetof(Attributes, output_scale)},
}};

constexpr size_t kValueBytes = 4;  // format_version and all attributes
static_assert(sizeof(Attributes) == kNumAttributes * kValueBytes);

const char* type_name(PluginFieldType type) {
  if (type == kInt) return "int32";
  return type == kFloat ? "float32" : nullptr;
}

[[noreturn]] void refuse(const char* name, const std::string& problem) {
  throw std::invalid_argument(text("field ", name, ": ", problem));
}

void read(const PluginField& field, PluginFieldType expected, void* value) {
  if (field.type != expected) {
    const char* found = type_name(field.type);
    refuse(field.name, text("expected ", type_name(expected), ", found ",
                            found ? found : text("field type ", static_cast<int32_t>(field.type))));
  }
  if (field.length != 1) refuse(field.name, text("expected 1 value, found ", field.length));
  if (field.data == nullptr) refuse(field.name, "expected a value, found a null pointer");
  std::memcpy(value, field.data, kValueBytes);
}

const PluginField* find(std::span<const PluginField> fields, std::string_view name) {
  const PluginField* found = nullptr;
  for (const PluginField& field : fields) {
    if (name != field.name) continue;
    if (found != nullptr) refuse(field.name, "expected once, found twice");
    found = &field;
  }
  return found;
}

const PluginField& require(std::span<const PluginField> fields, const char* name) {
  if (const PluginField* field = find(fields, name)) return *field;
  refuse(name, "expected, but not given");
}

void refuse_unknown(std::span<const PluginField> fields, bool versioned) {
  for (const PluginField& field : fields) {
    const std::string_view name = field.name;
    const auto is_it = [&](const Attribute& attribute) { return name == attribute.name; };
    if (std::any_of(kAttributes.begin(), kAttributes.end(), is_it)) continue;
    if (versioned && name == kFormatVersionName) continue;
    refuse(field.name, "not an attribute of this plugin");
  }
}

void require_format_version(std::span<const PluginField> fields) {
  int32_t version = 0;
  read(require(fields, kFormatVersionName), kInt, &version);
  if (version == kFormatVersion) return;
  refuse(kFormatVersionName, text("this library reads ", kFormatVersion, ", the engine holds ", version,
                                  "; build the engine with this library"));
}

void check_values(const Attributes& attributes) {
  for (const auto& [name, value] : {std::pair{"fp8_cache", attributes.fp8_cache},
                                    {"has_qkv_bias", attributes.has_qkv_bias},
                                    {"fp8_output", attributes.fp8_output}}) {
    if (value != 0 && value != 1) refuse(name, text("expected 0 or 1, found ", value));
  }
  if (const Problem problem = check_limits(attributes, 0, 1)) throw std::invalid_argument("field " + *problem);
}

}  // namespace

const PluginFieldCollection& attribute_names() {
  static const auto fields = [] {
    std::array<PluginField, kNumAttributes> out{};
    for (int32_t i = 0; i < kNumAttributes; ++i) {
      out[i] = PluginField{kAttributes[i].name, nullptr, kAttributes[i].type, 1};
    }
    return out;
  }();
  static const PluginFieldCollection collection{kNumAttributes, fields.data()};
  return collection;
}

Attributes parse_fields(const PluginFieldCollection* collection, TensorRTPhase phase) {
  if (collection == nullptr || (collection->fields == nullptr && collection->nbFields > 0)) {
    throw std::invalid_argument("expected fields, found a null pointer");
  }
  const std::span fields(collection->fields, static_cast<size_t>(std::max(0, collection->nbFields)));
  for (const PluginField& field : fields) {
    if (field.name == nullptr) throw std::invalid_argument("expected a field name, found null");
  }
  const bool versioned = phase == TensorRTPhase::kRUNTIME;
  if (versioned) require_format_version(fields);
  refuse_unknown(fields, versioned);
  Attributes attributes{};
  for (const Attribute& attribute : kAttributes) {
    auto* value = reinterpret_cast<std::byte*>(&attributes) + attribute.offset;
    read(require(fields, attribute.name), attribute.type, value);
  }
  check_values(attributes);
  return attributes;
}

SerializedFields::SerializedFields(const Attributes& attributes)
    : attributes_(attributes), collection_{kNumAttributes + 1, fields_.data()} {
  fields_[0] = PluginField{kFormatVersionName, &kFormatVersion, kInt, 1};
  for (int32_t i = 0; i < kNumAttributes; ++i) {
    const auto* value = reinterpret_cast<const std::byte*>(&attributes_) + kAttributes[i].offset;
    fields_[i + 1] = PluginField{kAttributes[i].name, value, kAttributes[i].type, 1};
  }
}

}  // namespace dflash::kv_injection
