// SPDX-License-Identifier: Apache-2.0
#include "kv_injection_attention/reference.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "kv_injection_attention/check.h"
#include "kv_injection_attention/context_layout.h"
#include "kv_injection_attention/numbers.h"

namespace dflash::kv_injection {
namespace {

using Row = std::vector<double>;  // [D], the values of one head

// One key/value head of one request: keys and values at positions 0 to context_length + S - 1.
struct Keys {
  std::vector<Row> k;  // normalised and rotated; empty if no block slot sees it
  std::vector<Row> v;
};

Row load_row(const void* tensor, int64_t row, int32_t D, DType dtype, double scale = 1) {
  Row out(D);
  for (int32_t d = 0; d < D; ++d) out[d] = scale * load(tensor, row * D + d, dtype);
  return out;
}

// x / sqrt(mean(x^2) + eps) * gamma
Row rms_norm(Row x, const void* gamma, const Params& p) {
  double squares = 0;
  for (const double value : x) squares += value * value;
  const double rms = std::sqrt(squares / p.head_dim + p.rms_norm_eps);
  for (int32_t d = 0; d < p.head_dim; ++d) x[d] = x[d] / rms * load(gamma, d, p.block_dtype);
  return x;
}

// Rotates the two halves of a head: (a, b) -> (a cos - b sin, b cos + a sin).
Row rotate(const Row& x, const float* rope) {
  const size_t half = x.size() / 2;
  const float *cos = rope, *sin = rope + half;
  Row out(x.size());
  for (size_t d = 0; d < half; ++d) {
    out[d] = x[d] * cos[d] - x[half + d] * sin[d];
    out[half + d] = x[half + d] * cos[d] + x[d] * sin[d];
  }
  return out;
}

// Head `head` of block slot s of request b, with its bias; query heads come first, then key heads, then value heads.
Row qkv_row(const Params& p, int32_t b, int32_t s, int32_t head) {
  const int64_t slot = int64_t{b} * p.block + s;
  const int32_t heads = p.num_heads + 2 * p.num_kv_heads;
  Row row = load_row(p.qkv, slot * heads + head, p.head_dim, p.block_dtype);
  if (p.qkv_bias == nullptr) return row;
  const Row bias = load_row(p.qkv_bias, head, p.head_dim, p.block_dtype);
  for (size_t d = 0; d < row.size(); ++d) row[d] += bias[d];
  return row;
}

// qkv_row, normalised and rotated.
Row rotated_row(const Params& p, const void* gamma, int32_t b, int32_t s, int32_t head) {
  const float* rope = p.rope + (int64_t{b} * p.block + s) * p.head_dim;
  return rotate(rms_norm(qkv_row(p, b, s, head), gamma, p), rope);
}

bool sees(const Params& p, int32_t query, int32_t key) {
  if (p.causal && key > query) return false;
  return p.sliding_window == 0 || std::abs(query - key) < p.sliding_window;
}

const int64_t* pointer_of(const Params& p) { return p.context_pointers + int64_t{p.layer} * kPointerSize; }

// Page table entry for context row j of request b.
int64_t entry_of(const Params& p, int32_t b, int32_t j) {
  return p.page_table[int64_t{p.slot_ids[b]} * p.max_pages + j / p.context_layout[kPageSize]];
}

// Whether the context of request b can be read: layout, slot id, length, and the entries of its visible rows.
bool is_valid(const Params& p, int32_t b) {
  const int32_t most = most_context_rows(p.max_pages, pointer_of(p), p.context_layout);
  const int32_t slot = p.slot_ids[b], length = p.context_lengths[b];
  if (most == 0 || slot < 0 || slot >= p.slots || length < 0 || length > most) return false;
  for (int32_t j = 0; j < length; ++j) {
    if (!sees(p, length, j)) continue;
    const int64_t entry = entry_of(p, b, j);
    if (entry < 0 || entry >= p.context_layout[kNumPages]) return false;
  }
  return true;
}

// K of context row j, key/value head g, of request b.
const unsigned char* context_row(const Params& p, int32_t b, int32_t g, int32_t j) {
  const int64_t* layout = p.context_layout;
  const auto* first = reinterpret_cast<const unsigned char*>(pointer_of(p)[kAddress]);
  return first + entry_of(p, b, j) * layout[kPageStride] + j % layout[kPageSize] * layout[kRowStride] +
         g * layout[kHeadStride];
}

Keys keys_of(const Params& p, int32_t b, int32_t g) {
  const int32_t G = p.num_kv_heads, D = p.head_dim, length = p.context_lengths[b];
  Keys keys;
  for (int32_t j = 0; j < length; ++j) {
    const bool visible = sees(p, length, j);  // the first block slot sees the most context
    const unsigned char* k = visible ? context_row(p, b, g, j) : nullptr;
    keys.k.push_back(visible ? load_row(k, 0, D, p.cache_dtype, p.k_scale) : Row());
    keys.v.push_back(visible ? load_row(k + p.context_layout[kKVStride], 0, D, p.cache_dtype, p.v_scale) : Row());
  }
  for (int32_t s = 0; s < p.block; ++s) {
    keys.k.push_back(rotated_row(p, p.k_norm, b, s, p.num_heads + g));
    keys.v.push_back(qkv_row(p, b, s, p.num_heads + G + g));
  }
  return keys;
}

double dot(const Row& a, const Row& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

// softmax(scores) v over the positions visible from `position`. A sink adds to the denominator but has no value.
Row attend(const Params& p, const Row& q, int32_t position, const Keys& keys, const float* sink) {
  std::vector<double> scores(keys.k.size(), -INFINITY);
  double maximum = sink ? *sink : -INFINITY;
  for (size_t j = 0; j < scores.size(); ++j) {
    if (!sees(p, position, static_cast<int32_t>(j))) continue;
    scores[j] = p.softmax_scale * dot(q, keys.k[j]);
    maximum = std::max(maximum, scores[j]);
  }
  double total = sink ? std::exp(*sink - maximum) : 0;
  Row mixed(q.size());
  for (size_t j = 0; j < scores.size(); ++j) {
    if (!sees(p, position, static_cast<int32_t>(j))) continue;
    const double weight = std::exp(scores[j] - maximum);
    total += weight;
    for (size_t d = 0; d < mixed.size(); ++d) mixed[d] += weight * keys.v[j][d];
  }
  for (double& value : mixed) value /= total;
  return mixed;
}

void attend_head(const Params& p, const Keys& keys, int32_t b, int32_t n) {
  const float* sink = p.sinks ? p.sinks + n : nullptr;
  for (int32_t s = 0; s < p.block; ++s) {
    const Row q = rotated_row(p, p.q_norm, b, s, n);
    const Row mixed = attend(p, q, p.context_lengths[b] + s, keys, sink);
    const int64_t row = (int64_t{b} * p.block + s) * p.num_heads + n;
    for (int32_t d = 0; d < p.head_dim; ++d) {
      store(p.out, row * p.head_dim + d, mixed[d] / p.out_scale, p.out_dtype);
    }
  }
}

void fill_with_nan(const Params& p, int32_t b) {
  const int64_t values = int64_t{p.block} * p.num_heads * p.head_dim;
  for (int64_t i = 0; i < values; ++i) store(p.out, b * values + i, NAN, p.out_dtype);
}

}  // namespace

void reference(const Params& p) {
  if (const Problem problem = check_params(p)) throw std::invalid_argument(*problem);
  const int32_t group = p.num_heads / p.num_kv_heads;
  for (int32_t b = 0; b < p.batch; ++b) {
    if (!is_valid(p, b)) {
      fill_with_nan(p, b);
      continue;
    }
    for (int32_t g = 0; g < p.num_kv_heads; ++g) {
      const Keys keys = keys_of(p, b, g);
      for (int32_t n = g * group; n < (g + 1) * group; ++n) attend_head(p, keys, b, n);
    }
  }
}

}  // namespace dflash::kv_injection
