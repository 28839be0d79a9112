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

void expect_shapes(const Params& p, std::span<const TensorView> inputs, const TensorView& out) {
  const int64_t B = p.batch, S = p.block, D = p.head_dim;
  const int64_t N = p.num_heads, G = p.num_kv_heads;
  const auto expect = [&](Input input, Shape shape) { expect_shape(input_name(input), inputs[input], shape); };
  expect(kQkv, {B, S, (N + 2 * G) * D});
  expect(kQNorm, {D});
  expect(kKNorm, {D});
  expect(kRope, {B, S, D});
  expect(kContextPointers, {p.layers});
  expect(kContextLayout, {kLayoutSize});
  expect(kPageTable, {p.slots, p.max_pages});
  expect(kSlotIds, {B});
  expect(kContextLengths, {B});
  if (inputs.size() > kSinks) expect(kSinks, {N});
  expect_shape("out", out, {B, S, N * D});
}

void expect_types(std::span<const TensorView> inputs, const TensorView& out) {
  const ElementType block = inputs[kQkv].type;
  for (const Input input : {kQNorm, kKNorm}) {
    expect_type(input_name(input), inputs[input], block);
  }
  expect_type("out", out, block);
  expect_type(input_name(kRope), inputs[kRope], ElementType::kF32);
  for (const Input input : {kContextPointers, kContextLayout}) {
    expect_type(input_name(input), inputs[input], ElementType::kI64);
  }
  for (const Input input : {kPageTable, kSlotIds, kContextLengths}) {
    expect_type(input_name(input), inputs[input], ElementType::kI32);
  }
  if (inputs.size() > kSinks) expect_type(input_name(kSinks), inputs[kSinks], ElementType::kF32);
}

template <typename Element>
const Element* data(const TensorView& tensor) {
  return static_cast<const Element*>(tensor.data);
}

}  // namespace

const char* input_name(int32_t input) {
  constexpr const char* kNames[] = {
      "qkv",        "q_norm",   "k_norm",          "rope", "context_pointers", "context_layout",
      "page_table", "slot_ids", "context_lengths", "sinks"};
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
  return p;
}

Problem check_limits(const Attributes& attributes, int32_t batch, int32_t block) {
  Params probe = make_params(attributes);
  probe.batch = batch;
  probe.block = block;
  probe.slots = probe.max_pages = 1;
  probe.layers = std::numeric_limits<int32_t>::max();
  probe.block_dtype = DType::kBF16;
  probe.cache_dtype = attributes.fp8_cache != 0 ? DType::kF8E4M3 : DType::kBF16;
  return check_sizes(probe);
}

Params make_params(const Attributes& attributes, std::span<const TensorView> inputs, const TensorView& out) {
  const TensorView &qkv = inputs[kQkv], &page_table = inputs[kPageTable];
  expect_shape(input_name(kQkv), qkv, {kAny, kAny, kAny});
  expect_shape(input_name(kContextPointers), inputs[kContextPointers], {kAny});
  expect_shape(input_name(kPageTable), page_table, {kAny, kAny});
  expect_types(inputs, out);

  Params p = make_params(attributes);
  p.batch = size(input_name(kQkv), qkv, 0);
  p.block = size(input_name(kQkv), qkv, 1);
  p.slots = size(input_name(kPageTable), page_table, 0);
  p.layers = size(input_name(kContextPointers), inputs[kContextPointers], 0);
  p.max_pages = size(input_name(kPageTable), page_table, 1);
  p.block_dtype = storage(input_name(kQkv), qkv);
  p.cache_dtype = attributes.fp8_cache != 0 ? DType::kF8E4M3 : p.block_dtype;
  expect_shapes(p, inputs, out);

  p.qkv = qkv.data;
  p.q_norm = inputs[kQNorm].data;
  p.k_norm = inputs[kKNorm].data;
  p.rope = data<float>(inputs[kRope]);
  p.context_pointers = data<int64_t>(inputs[kContextPointers]);
  p.context_layout = data<int64_t>(inputs[kContextLayout]);
  p.page_table = data<int32_t>(page_table);
  p.slot_ids = data<int32_t>(inputs[kSlotIds]);
  p.context_lengths = data<int32_t>(inputs[kContextLengths]);
  p.sinks = inputs.size() > kSinks ? data<float>(inputs[kSinks]) : nullptr;
  p.out = out.data;
  return p;
}

const char* append_input_name(int32_t input) {
  constexpr const char* kNames[] = {"k", "v", "page_ids", "offsets"};
  static_assert(std::size(kNames) == kAppendInputs);
  return kNames[input];
}

AppendParams make_append_params(std::span<const TensorView> inputs, const TensorView& k_cache,
                                const TensorView& v_cache) {
  const TensorView &k = inputs[kNewK], &v = inputs[kNewV], &page_ids = inputs[kPageIds], &offsets = inputs[kOffsets];
  expect_shape("k", k, {kAny, kAny, kAny, kAny});
  expect_shape("k_cache", k_cache, {kAny, kAny, kAny, kAny, kAny});
  AppendParams p{};
  p.rows = size("k", k, 0);
  p.num_pages = size("k_cache", k_cache, 0);
  p.layers = size("k_cache", k_cache, 1);
  p.page_rows = size("k_cache", k_cache, 2);
  const int64_t heads = size("k_cache", k_cache, 3), width = size("k_cache", k_cache, 4);
  expect_shape("k", k, {p.rows, p.layers, heads, width});
  expect_shape("v", v, {p.rows, p.layers, heads, width});
  expect_shape("v_cache", v_cache, {p.num_pages, p.layers, p.page_rows, heads, width});
  expect_shape("page_ids", page_ids, {p.rows});
  expect_shape("offsets", offsets, {p.rows});
  expect_type("page_ids", page_ids, ElementType::kI32);
  expect_type("offsets", offsets, ElementType::kI32);
  expect_type("k", k, k_cache.type);
  expect_type("v", v, k_cache.type);
  expect_type("v_cache", v_cache, k_cache.type);
  p.row_bytes = heads * width * element_bytes("k_cache", k_cache);
  p.k = k.data;
  p.v = v.data;
  p.page_ids = data<int32_t>(page_ids);
  p.offsets = data<int32_t>(offsets);
  p.k_cache = k_cache.data;
  p.v_cache = v_cache.data;
  return p;
}

}  // namespace dflash::kv_injection
