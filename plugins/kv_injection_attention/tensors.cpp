// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/tensors.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>

#include "common/text.h"

namespace dflash::kv_injection {
namespace {

constexpr int64_t kAny = -1;
using Shape = std::initializer_list<int64_t>;

const char* type_name(ElementType type) {
  switch (type) {
    case ElementType::kF16:
      return "float16";
    case ElementType::kBF16:
      return "bfloat16";
    case ElementType::kF8E4M3:
      return "float8_e4m3fn";
    case ElementType::kF32:
      return "float32";
    case ElementType::kI32:
      return "int32";
    case ElementType::kI64:
      return "int64";
    case ElementType::kOther:
      break;
  }
  return "another dtype";
}

std::string shape_text(std::span<const int64_t> shape) {
  std::string out;
  for (const int64_t size : shape) {
    out += (out.empty() ? "[" : ", ") + (size == kAny ? "any" : std::to_string(size));
  }
  return out.empty() ? "[]" : out + "]";
}

std::span<const int64_t> shape_of(const TensorView& tensor) {
  return {tensor.shape.data(), static_cast<size_t>(tensor.rank)};
}

void expect_shape(const char* name, const TensorView& tensor, Shape expected) {
  const auto found = shape_of(tensor);
  const auto fits = [](int64_t size, int64_t wanted) { return wanted == kAny || size == wanted; };
  if (std::equal(found.begin(), found.end(), expected.begin(), expected.end(), fits)) return;
  throw std::invalid_argument(text(name, ": expected shape ", shape_text(expected), ", found ", shape_text(found)));
}

void expect_type(const char* name, const TensorView& tensor, ElementType expected) {
  if (tensor.type == expected) return;
  throw std::invalid_argument(text(name, ": expected dtype ", type_name(expected), ", found ", type_name(tensor.type)));
}

DType storage(const char* name, const TensorView& tensor) {
  switch (tensor.type) {
    case ElementType::kF16:
      return DType::kF16;
    case ElementType::kBF16:
      return DType::kBF16;
    default:
      throw std::invalid_argument(text(name, ": expected dtype float16 or bfloat16, found ", type_name(tensor.type)));
  }
}

int64_t element_bytes(const char* name, const TensorView& tensor) {
  switch (tensor.type) {
    case ElementType::kF8E4M3:
      return 1;
    case ElementType::kF16:
    case ElementType::kBF16:
      return 2;
    case ElementType::kF32:
      return 4;
    default:
      throw std::invalid_argument(
          text(name, ": expected dtype float16, bfloat16, float8_e4m3fn or float32, found ", type_name(tensor.type)));
  }
}

int32_t size(const char* name, const TensorView& tensor, int32_t axis) {
  const int64_t value = tensor.shape[axis];
  if (value >= 0 && value <= std::numeric_limits<int32_t>::max()) return static_cast<int32_t>(value);
  throw std::invalid_argument(text(name, ": expected 0 to 2147483647 along axis ", axis, ", found ", value));
}

// The inputs that are present, by role.
using Given = std::array<const TensorView*, kMaxInputs>;

Given by_name(const Attributes& attributes, std::span<const TensorView> inputs) {
  expect_inputs(attributes, static_cast<int32_t>(inputs.size()));
  Given given{};
  for (size_t i = 0; i < inputs.size(); ++i) given[input_at(attributes, static_cast<int32_t>(i))] = &inputs[i];
  return given;
}

// qkv and the output have a row for each slot of the block. Requests and slots are two axes, or one axis that may end
// with rows of padding.
void expect_rows(const Params& p, const TensorView& qkv, const TensorView& out) {
  const int64_t B = p.batch, S = p.block, D = p.head_dim;
  const int64_t in = (int64_t{p.num_heads} + 2 * p.num_kv_heads) * D, mixed = p.num_heads * D;
  if (qkv.rank != 2) {
    expect_shape(input_name(kQkv), qkv, {B, S, in});
    expect_shape("out", out, {B, S, mixed});
    return;
  }
  expect_shape(input_name(kQkv), qkv, {kAny, in});
  if (qkv.shape[0] < B * S) {
    throw std::invalid_argument(text(input_name(kQkv), ": expected at least ", B * S, " rows, found ", qkv.shape[0]));
  }
  expect_shape("out", out, {qkv.shape[0], mixed});
}

void expect_shapes(const Params& p, const Given& inputs, const TensorView& out) {
  const int64_t B = p.batch, S = p.block, D = p.head_dim;
  const int64_t N = p.num_heads, G = p.num_kv_heads;
  const auto expect = [&](Input input, Shape shape) {
    if (inputs[input] != nullptr) expect_shape(input_name(input), *inputs[input], shape);
  };
  expect_rows(p, *inputs[kQkv], out);
  expect(kQNorm, {D});
  expect(kKNorm, {D});
  expect(kRope, {B, S, D});
  expect(kContextPointers, {p.layers, kPointerSize});
  expect(kContextLayout, {kLayoutSize});
  expect(kPageTable, {p.slots, p.max_pages});
  expect(kSlotIds, {B});
  expect(kContextLengths, {B});
  expect(kQkvBias, {(N + 2 * G) * D});
  expect(kSinks, {N});
}

void expect_types(const Attributes& attributes, const Given& inputs, const TensorView& out) {
  const ElementType block = inputs[kQkv]->type;
  const auto expect = [&](ElementType type, std::initializer_list<Input> of) {
    for (const Input input : of) {
      if (inputs[input] != nullptr) expect_type(input_name(input), *inputs[input], type);
    }
  };
  expect(block, {kQNorm, kKNorm, kQkvBias});
  expect_type("out", out, attributes.fp8_output != 0 ? ElementType::kF8E4M3 : block);
  expect(ElementType::kF32, {kRope, kSinks});
  expect(ElementType::kI64, {kContextPointers, kContextLayout});
  expect(ElementType::kI32, {kPageTable, kSlotIds, kContextLengths});
}

template <typename Element = void>
const Element* data(const TensorView* tensor) {
  return tensor != nullptr ? static_cast<const Element*>(tensor->data) : nullptr;
}

void set_formats(const Attributes& attributes, DType block, Params& p) {
  p.block_dtype = block;
  p.cache_dtype = attributes.fp8_cache != 0 ? DType::kF8E4M3 : block;
  p.out_dtype = attributes.fp8_output != 0 ? DType::kF8E4M3 : block;
}

}  // namespace

Input input_at(const Attributes& attributes, int32_t place) {
  return static_cast<Input>(place < kQkvBias || attributes.has_qkv_bias != 0 ? place : place + 1);
}

void expect_inputs(const Attributes& attributes, int32_t count) {
  const int32_t least = attributes.has_qkv_bias != 0 ? kSinks : kQkvBias;
  if (count == least || count == least + 1) return;
  throw std::invalid_argument(
      text("inputs: expected ", least, " tensors, or ", least + 1, " with sinks, found ", count));
}

const char* input_name(Input input) {
  constexpr const char* kNames[] = {"qkv",        "q_norm",   "k_norm",          "rope",     "context_pointers",
                                    "context_layout", "page_table", "slot_ids", "context_lengths", "qkv_bias",
                                    "sinks"};
  static_assert(std::size(kNames) == kMaxInputs);
  return kNames[input];
}

Params make_params(const Attributes& attributes) {
  Params p{};
  p.layer = attributes.layer;
  p.num_heads = attributes.num_heads;
  p.num_kv_heads = attributes.num_kv_heads;
  p.head_dim = attributes.head_dim;
  p.rms_norm_eps = attributes.rms_norm_eps;
  p.softmax_scale = attributes.softmax_scale;
  p.sliding_window = attributes.sliding_window;
  p.causal = attributes.causal;
  p.k_scale = attributes.k_scale;
  p.v_scale = attributes.v_scale;
  p.out_scale = attributes.output_scale;
  return p;
}

Problem check_limits(const Attributes& attributes, int32_t batch, int32_t block) {
  Params probe = make_params(attributes);
  probe.batch = batch;
  probe.block = block;
  probe.slots = probe.max_pages = 1;
  probe.layers = std::numeric_limits<int32_t>::max();
  probe.block_dtype = DType::kBF16;
  set_formats(attributes, DType::kBF16, probe);
  return check_sizes(probe);
}

Params make_params(const Attributes& attributes, std::span<const TensorView> tensors, const TensorView& out) {
  const Given inputs = by_name(attributes, tensors);
  const auto axis = [&](Input input, int32_t index) { return size(input_name(input), *inputs[input], index); };
  expect_shape(input_name(kRope), *inputs[kRope], {kAny, kAny, kAny});
  expect_shape(input_name(kContextPointers), *inputs[kContextPointers], {kAny, kPointerSize});
  expect_shape(input_name(kPageTable), *inputs[kPageTable], {kAny, kAny});
  expect_types(attributes, inputs, out);

  Params p = make_params(attributes);
  p.batch = axis(kRope, 0);
  p.block = axis(kRope, 1);
  p.slots = axis(kPageTable, 0);
  p.layers = axis(kContextPointers, 0);
  p.max_pages = axis(kPageTable, 1);
  set_formats(attributes, storage(input_name(kQkv), *inputs[kQkv]), p);
  expect_shapes(p, inputs, out);

  p.qkv = data(inputs[kQkv]);
  p.qkv_bias = data(inputs[kQkvBias]);
  p.q_norm = data(inputs[kQNorm]);
  p.k_norm = data(inputs[kKNorm]);
  p.rope = data<float>(inputs[kRope]);
  p.context_pointers = data<int64_t>(inputs[kContextPointers]);
  p.context_layout = data<int64_t>(inputs[kContextLayout]);
  p.page_table = data<int32_t>(inputs[kPageTable]);
  p.slot_ids = data<int32_t>(inputs[kSlotIds]);
  p.context_lengths = data<int32_t>(inputs[kContextLengths]);
  p.sinks = data<float>(inputs[kSinks]);
  p.out = out.data;
  return p;
}

const char* append_input_name(int32_t input) {
  constexpr const char* kNames[] = {"kv", "page_ids", "offsets"};
  static_assert(std::size(kNames) == kAppendInputs);
  return kNames[input];
}

AppendParams make_append_params(std::span<const TensorView> inputs, const TensorView& k_cache,
                                const TensorView& v_cache) {
  const TensorView &kv = inputs[kNewRows], &page_ids = inputs[kPageIds], &offsets = inputs[kOffsets];
  expect_shape("kv", kv, {kAny, 2, kAny, kAny, kAny});
  expect_shape("k_cache", k_cache, {kAny, kAny, kAny, kAny, kAny});
  AppendParams p{};
  p.rows = size("kv", kv, 0);
  p.num_pages = size("k_cache", k_cache, 0);
  p.layers = size("k_cache", k_cache, 1);
  p.page_rows = size("k_cache", k_cache, 2);
  const int64_t heads = size("k_cache", k_cache, 3), width = size("k_cache", k_cache, 4);
  expect_shape("kv", kv, {p.rows, 2, p.layers, heads, width});
  expect_shape("v_cache", v_cache, {p.num_pages, p.layers, p.page_rows, heads, width});
  expect_shape("page_ids", page_ids, {p.rows});
  expect_shape("offsets", offsets, {p.rows});
  expect_type("page_ids", page_ids, ElementType::kI32);
  expect_type("offsets", offsets, ElementType::kI32);
  expect_type("kv", kv, k_cache.type);
  expect_type("v_cache", v_cache, k_cache.type);
  p.row_bytes = heads * width * element_bytes("k_cache", k_cache);
  p.kv = kv.data;
  p.page_ids = data<int32_t>(&page_ids);
  p.offsets = data<int32_t>(&offsets);
  p.k_cache = k_cache.data;
  p.v_cache = v_cache.data;
  return p;
}

}  // namespace dflash::kv_injection
