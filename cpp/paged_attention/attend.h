// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "cpu/scratch.h"
#include "cpu/vectors.h"
#include "paged_attention/kernels.h"

// Attention of rows over the pages of their sequence, one page at a time with a running maximum (FlashAttention-2,
// https://arxiv.org/abs/2307.08691, algorithm 1). Both products are summed in index order, and pages have absolute
// positions, so the order of a row's sums does not depend on other rows. In FlashAttention's terms: kBlockM is
// kBlockRows, packed as by PackGQA; kBlockN is a page of the block_table; num_splits is 1, which batch invariance
// requires. In oneDNN's terms, product() is a brgemm whose B is already packed, because K's pages are stored
// transposed.

namespace dflash {
namespace {

constexpr float kMinusInfinity = -INFINITY;

// out [kRows, kVectors vectors] = a [kRows, depth] @ b [depth, kVectors vectors]; optionally accumulates into out.
template <class Element, int kRows, int kVectors>
void product(const float* a, int64_t a_stride, const Element* b, int64_t b_stride, int64_t depth, bool adds, float* out,
             int64_t out_stride) {
  Floats sums[kRows][kVectors] = {};
  if (adds) {
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sums[r][v] = load(out + r * out_stride + v * kLanes);
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    Floats values[kVectors];
    for (int v = 0; v < kVectors; ++v) values[v] = load(b + i * b_stride + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVectors; ++v) sums[r][v] += a[r * a_stride + i] * values[v];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) store(sums[r][v], out + r * out_stride + v * kLanes);
  }
}

// The product for 1 to kMaxRows rows, unrolled for each number of rows.
template <class Element, int kMaxRows, int kVectors, class... Arguments>
void product_of(int64_t rows, Arguments... arguments) {
  if constexpr (kMaxRows > 1) {
    if (rows < kMaxRows) return product_of<Element, kMaxRows - 1, kVectors>(rows, arguments...);
  }
  product<Element, kMaxRows, kVectors>(arguments...);
}

template <class Element>
const Element* row_of(const HeadRows& rows, int64_t head, int64_t row) {
  return static_cast<const Element*>(rows.data) + head * rows.head_stride + row * rows.row_stride;
}

// The online softmax of rows [begin, end) of a segment and KV head. kTile rows share loaded pages.
template <class Element, int kTile>
class Block {
 public:
  Block(const PagedAttention& layer, const SegmentRows& segment, int64_t kv_head, int64_t begin, int64_t end)
      : layer_(layer),
        segment_(segment),
        kv_head_(kv_head),
        begin_(begin),
        count_(end - begin),
        width_(padded(layer.value_dim)) {
    const int64_t floats = count_ * (layer.head_dim + width_ + kLanes);
    query_ = scratch(floats);
    outputs_ = query_ + count_ * layer.head_dim;
    sums_ = outputs_ + count_ * width_;
    std::memset(outputs_, 0, sizeof(float) * count_ * (width_ + kLanes));
    for (int64_t r = 0; r < count_; ++r) load_query(r);
  }

  void attend_pages() {
    const int64_t first = layer_.window == 0 ? 0 : max(0, position(0) - layer_.window + 1);
    const int64_t last = position(count_ - 1);
    for (int64_t page = first / kTokensPerPage; page <= last / kTokensPerPage; ++page) {
      const int64_t at = (kv_head_ * layer_.num_pages + segment_.pages[page]) * kTokensPerPage;
      const Element* k = static_cast<const Element*>(layer_.k_cache) + at * layer_.head_dim;
      const Element* v = static_cast<const Element*>(layer_.v_cache) + at * width_;
      for (int64_t r = 0; r < count_; r += kTile) {
        attend_page(page * kTokensPerPage, k, v, r, min(count_ - r, kTile));
      }
    }
    for (int64_t r = 0; r < count_; ++r) write_output(r);
  }

 private:
  int64_t position(int64_t r) const { return segment_.begin + (begin_ + r) / layer_.group_size(); }
  int64_t head(int64_t r) const { return kv_head_ * layer_.group_size() + (begin_ + r) % layer_.group_size(); }
  int64_t row(int64_t r) const { return segment_.first_row + (begin_ + r) / layer_.group_size(); }

  void load_query(int64_t r) {
    const Element* query = row_of<Element>(layer_.query, head(r), row(r));
    float* scaled = query_ + r * layer_.head_dim;
    for (int64_t i = 0; i < layer_.head_dim; ++i) scaled[i] = to_float(query[i]) * layer_.scale;
    const bool has_sink = layer_.sinks != nullptr;
    maximum_[r] = has_sink ? layer_.sinks[head(r)] : kMinusInfinity;
    sums_[r * kLanes] = has_sink ? 1.0f : 0.0f;  // e^(sink - maximum); a sink has no value
  }

  // Processes a page, whose first position is `first`, for `rows` rows from r on.
  void attend_page(int64_t first, const Element* k, const Element* v, int64_t r, int64_t rows) {
    const int64_t low = position(r), high = position(r + rows - 1);
    if (high < first) return;
    if (layer_.window != 0 && first + kTokensPerPage - 1 <= low - layer_.window) return;
    float scores[kTile * kTokensPerPage];
    for (int64_t key = 0; key < kTokensPerPage; key += 2 * kLanes) {
      product_of<Element, kTile, 2>(rows, query_ + r * layer_.head_dim, layer_.head_dim, k + key, kTokensPerPage,
                                    layer_.head_dim, false, scores + key, kTokensPerPage);
    }
    for (int64_t i = 0; i < rows; ++i) softmax_weights(first, r + i, scores + i * kTokensPerPage);
    if (low >= first + kTokensPerPage - 1) {
      accumulate_values(v, kTokensPerPage, scores, r, rows);
    } else {  // token by token, so that no row adds 0 * NaN from a later token
      for (int64_t i = 0, next; i < rows; i = next) {
        for (next = i + 1; next < rows && position(r + next) == position(r + i);) ++next;
        const int64_t num_visible = min(kTokensPerPage, position(r + i) - first + 1);
        if (num_visible > 0) accumulate_values(v, num_visible, scores + i * kTokensPerPage, r + i, next - i);
      }
    }
  }

  // Adds the first `num_visible` values of a page, weighted by `weights` [rows, 32], to rows from r on.
  void accumulate_values(const Element* v, int64_t num_visible, const float* weights, int64_t r, int64_t rows) {
    for (int64_t column = 0; column < width_;) {
      float* output = outputs_ + r * width_ + column;
      const Element* values = v + column;
      if (width_ - column >= 2 * kLanes) {
        product_of<Element, kTile, 2>(rows, weights, kTokensPerPage, values, width_, num_visible, true, output, width_);
        column += 2 * kLanes;
      } else {
        product_of<Element, kTile, 1>(rows, weights, kTokensPerPage, values, width_, num_visible, true, output, width_);
        column += kLanes;
      }
    }
  }

  // Turns scores [32] of row r into e^(score - maximum) and rescales the row's sums to a new maximum.
  void softmax_weights(int64_t first, int64_t r, float* scores) {
    Floats parts[kTokensPerPage / kLanes], most = Floats{} + kMinusInfinity;
    for (int64_t i = 0; i < kTokensPerPage / kLanes; ++i) {
      parts[i] = visible(first + i * kLanes, r, capped(load(scores + i * kLanes)));
      most = max(parts[i], most);
    }
    const float highest = largest(most);
    Floats weight = load(sums_ + r * kLanes);
    if (!(highest <= maximum_[r])) {
      const Floats factor = exp(Floats{} + (maximum_[r] - highest));
      for (int64_t i = 0; i < width_; i += kLanes) {
        float* output = outputs_ + r * width_ + i;
        store(load(output) * factor, output);
      }
      weight *= factor;
      maximum_[r] = highest;
    }
    const float base = maximum_[r] == kMinusInfinity ? 0.0f : maximum_[r];  // no key was visible yet
    for (int64_t i = 0; i < kTokensPerPage / kLanes; ++i) {
      const Floats e = exp(parts[i] - base);
      weight += e;
      store(e, scores + i * kLanes);
    }
    store(weight, sums_ + r * kLanes);
  }

  Floats capped(Floats scores) const {
    return layer_.softcap == 0.0f ? scores : tanh(scores / layer_.softcap) * layer_.softcap;
  }

  // Sets scores to minus infinity at positions from `first` on that row r does not see.
  Floats visible(int64_t first, int64_t r, Floats scores) const {
    const int64_t last = position(r) - first;  // the last lane that is visible
    const int64_t before = layer_.window == 0 ? -1 : last - layer_.window;
    if (last >= kLanes - 1 && before < 0) return scores;
    Ints lane;
    for (int32_t i = 0; i < kLanes; ++i) lane[i] = i;
    const auto clamped = [](int64_t i) { return static_cast<int32_t>(max(-1, min(i, kLanes))); };
    const Ints is_visible = (lane <= clamped(last)) & (lane > clamped(before));
    return is_visible ? scores : Floats{} + kMinusInfinity;
  }

  void write_output(int64_t r) {
    const float weight = sum(load(sums_ + r * kLanes));
    Element* out = static_cast<Element*>(layer_.out) + (row(r) * layer_.num_heads + head(r)) * layer_.value_dim;
    for (int64_t i = 0; i < layer_.value_dim; i += kLanes) {
      Element values[kLanes];
      store(load(outputs_ + r * width_ + i) / weight, values);
      copy(values, min(kLanes, layer_.value_dim - i), out + i);
    }
  }

  const PagedAttention& layer_;
  const SegmentRows& segment_;
  const int64_t kv_head_, begin_, count_, width_;
  float* query_;    // [count, D], premultiplied by the scale
  float* outputs_;  // [count, E']
  float* sums_;     // sums of the weights: [count, kLanes], to be reduced
  float maximum_[kBlockRows];
};

template <class Element, int kTile>
void attend(const PagedAttention& layer, const SegmentRows& segment, int64_t kv_head, int64_t begin, int64_t end) {
  Block<Element, kTile>(layer, segment, kv_head, begin, end).attend_pages();
}

template <class Element>
void store_rows(const PagedAttention& layer, const SegmentRows& segment, int64_t kv_head) {
  const int64_t width = padded(layer.value_dim);
  for (int64_t i = 0; i < segment.num_tokens; ++i) {
    const int64_t position = segment.begin + i, slot = position % kTokensPerPage;
    const int64_t at = (kv_head * layer.num_pages + segment.pages[position / kTokensPerPage]) * kTokensPerPage;
    Element* k = static_cast<Element*>(layer.k_cache) + at * layer.head_dim + slot;
    Element* v = static_cast<Element*>(layer.v_cache) + (at + slot) * width;
    const Element* key = row_of<Element>(layer.key, kv_head, segment.first_row + i);
    const Element* value = row_of<Element>(layer.value, kv_head, segment.first_row + i);
    for (int64_t d = 0; d < layer.head_dim; ++d) k[d * kTokensPerPage] = key[d];
    copy(value, layer.value_dim, v);
  }
}

template <int kTile>
AttentionKernels attention_kernels(CacheType type) {
  if (type == CacheType::kBf16) return {.store = store_rows<Bf16>, .attend = attend<Bf16, kTile>};
  return {.store = store_rows<float>, .attend = attend<float, kTile>};
}

}  // namespace
}  // namespace dflash
