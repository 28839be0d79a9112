// SPDX-License-Identifier: Apache-2.0
// The kernel. It is compiled once per instruction set, so everything here has internal linkage.
//
// Vector lanes are the query rows of a KV head, S for each of its query heads. Scores are sums of such a vector times
// one element of a key, outputs of one times an element of a value. Keys and values are therefore read in place, and
// nothing is summed across lanes.
//
// In FlashAttention's terms this is PackGQA (a tile has all query heads of a KV head), kTile is kBlockN, and num_splits
// is 1: a task is a request and KV head, so keys are not split and no partial results are combined.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>

#include <math.h>

#include "block_attention/block_attention.h"
#include "cpu/scratch.h"
#include "cpu/vectors.h"

namespace dflash {
namespace {

constexpr int64_t kTile = 32;  // keys per tile: with 64 dimensions, keys and values take 16 KiB

inline int64_t in_vectors(int64_t count) { return (count + kLanes - 1) / kLanes; }

// x / sqrt(mean(x^2) + eps) * gamma, its two halves rotated by cos and sin [D/2].
inline void norm_and_rotate(const float* __restrict__ x, const float* __restrict__ gamma,
                            const float* __restrict__ rope, int64_t D, float eps, float* __restrict__ out) {
  Floats squares{};
  int64_t d = 0;
  for (; d + kLanes <= D; d += kLanes) {
    Floats part;
    std::memcpy(&part, x + d, sizeof part);
    squares += part * part;
  }
  float sum = 0;
  for (; d < D; ++d) sum += x[d] * x[d];
  for (int64_t i = 0; i < kLanes; ++i) sum += squares[i];
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(D) + eps);
  const int64_t half = D / 2;
  for (d = 0; d < half; ++d) {
    const float first = x[d] * factor * gamma[d], second = x[half + d] * factor * gamma[half + d];
    out[d] = first * rope[d] - second * rope[half + d];
    out[half + d] = second * rope[d] + first * rope[half + d];
  }
}

// The online softmax of FlashAttention (arXiv 2205.14135) for rows of queries.
struct Lanes {
  Ints positions;
  Floats maximum;
  Floats sum;
};

// Rows [D] of keys and values.
struct Tile {
  const float* keys[kTile];
  const float* values[kTile];
};

class Head {
 public:
  Head(const BlockAttention& attention, int64_t request, int64_t kv_head)
      : a_(attention),
        b_(request),
        g_(kv_head),
        D_(a_.head_dim),
        dims_(in_vectors(D_) * kLanes),
        group_(a_.num_heads / a_.num_kv_heads),
        rows_(group_ * a_.block),
        length_(a_.context_lengths[request]),
        num_lanes_(in_vectors(rows_)) {
    const int64_t vectors = num_lanes_ * dims_ * kLanes, lanes = num_lanes_ * sizeof(Lanes) / sizeof(float);
    const int64_t block_keys = a_.block * D_, tile = kTile * dims_, values = D_ % kLanes ? tile : 0;
    const int64_t floats = lanes + 2 * vectors + tile + values + block_keys + D_;
    float* memory = scratch(floats);
    std::memset(memory, 0, sizeof(float) * floats);
    lanes_ = reinterpret_cast<Lanes*>(memory);
    queries_ = reinterpret_cast<Floats*>(memory += lanes);
    outputs_ = reinterpret_cast<Floats*>(memory += vectors);
    keys_ = memory += vectors;
    values_ = values ? memory + tile : nullptr;
    block_keys_ = memory += tile + values;
    row_ = memory + block_keys;
  }

  void attend() {
    // The first block slot sees furthest back.
    const int64_t first = a_.sliding_window == 0 ? 0 : max(0, length_ - a_.sliding_window + 1);
    const int64_t end = length_ + a_.block;
    locate(first, min(kTile, end - first));
    for (int64_t d = 0; d < D_; d += kLanes) {
      for (int64_t j = 0; j < kTile; ++j) __builtin_prefetch(next_.keys[j] + d);
    }
    load_queries();
    load_block_keys();
    for (int64_t key = first; key < end; key += kTile) {
      const int64_t count = min(kTile, end - key);
      load_tile(count);
      if (key + kTile < end) locate(key + kTile, min(kTile, end - key - kTile));
      for (int64_t i = 0; i < num_lanes_; ++i) attend_tile(i, key, count);
    }
    write_outputs();
  }

 private:
  const float* slot(int64_t s) const {
    return a_.qkv + (b_ * a_.block + s) * (a_.num_heads + 2 * a_.num_kv_heads) * D_;
  }
  const float* rope(int64_t s) const { return a_.rope + (b_ * a_.block + s) * D_; }

  void load_queries() {
    for (int64_t r = 0; r < num_lanes_ * kLanes; ++r) {
      const int64_t head = min(r, rows_ - 1) / a_.block, s = min(r, rows_ - 1) % a_.block;
      const int64_t i = r / kLanes, lane = r % kLanes, n = g_ * group_ + head;
      lanes_[i].positions[lane] = static_cast<int32_t>(length_ + s);
      lanes_[i].maximum[lane] = a_.sinks ? a_.sinks[n] : -FLT_MAX;
      lanes_[i].sum[lane] = a_.sinks ? 1.0f : 0.0f;
      norm_and_rotate(slot(s) + n * D_, a_.q_norm, rope(s), D_, a_.rms_norm_eps, row_);
      float* column = reinterpret_cast<float*>(&queries_[i * dims_]) + lane;
      for (int64_t d = 0; d < D_; ++d) column[d * kLanes] = row_[d] * a_.softmax_scale;
    }
  }

  void load_block_keys() {
    for (int64_t s = 0; s < a_.block; ++s) {
      const float* key = slot(s) + (a_.num_heads + g_) * D_;
      norm_and_rotate(key, a_.k_norm, rope(s), D_, a_.rms_norm_eps, block_keys_ + s * D_);
    }
  }

  // Locates the `count` keys and values from position `key` on; block slots follow the context.
  void locate(int64_t key, int64_t count) {
    for (int64_t j = 0; j < kTile; ++j) {
      const int64_t position = key + min(j, count - 1), s = position - length_;
      if (s < 0) {
        const int64_t page = a_.page_ids[b_ * a_.pages_per_request + position / a_.page_rows];
        const int64_t row = (page * a_.layers + a_.layer) * a_.page_rows + position % a_.page_rows;
        const int64_t at = (row * a_.num_kv_heads + g_) * D_;
        next_.keys[j] = a_.k_cache + at;
        next_.values[j] = a_.v_cache + at;
      } else {
        next_.keys[j] = block_keys_ + s * D_;
        next_.values[j] = slot(s) + (a_.num_heads + a_.num_kv_heads + g_) * D_;
      }
    }
  }

  // Loads the located tile: rearranges its keys to [D / kLanes, kTile, kLanes].
  void load_tile(int64_t count) {
    tile_ = next_;
    for (int64_t j = 0; j < count; ++j) {
      const float* key = tile_.keys[j];
      int64_t d = 0;
      float* out = &keys_[j * kLanes];
      for (; d + kLanes <= D_; d += kLanes, out += kTile * kLanes) std::memcpy(out, key + d, sizeof(Floats));
      if (d < D_) copy(key + d, D_ - d, out);
      if (values_) {
        std::memcpy(&values_[j * dims_], tile_.values[j], sizeof(float) * D_);
        tile_.values[j] = &values_[j * dims_];
      }
    }
  }

  void attend_tile(int64_t i, int64_t key, int64_t count) {
    Floats scores[kTile];
    for (int64_t j = 0; j < count; j += kLanes) score(&queries_[i * dims_], j, scores);
    mask(lanes_[i].positions, key, count, scores);
    Floats maximum = lanes_[i].maximum;
    for (int64_t j = 0; j < count; ++j) maximum = scores[j] > maximum ? scores[j] : maximum;
    const Floats rescale = exp(lanes_[i].maximum - maximum);
    Floats sum = lanes_[i].sum * rescale;
    for (int64_t j = 0; j < count; ++j) {
      scores[j] = exp(scores[j] - maximum);
      sum += scores[j];
    }
    lanes_[i].maximum = maximum;
    lanes_[i].sum = sum;
    for (int64_t d = 0; d < dims_; d += kLanes) accumulate_values(&outputs_[i * dims_ + d], rescale, scores, d, count);
  }

  void score(const Floats* query, int64_t j, Floats* scores) const {
    Floats sums[kLanes] = {};
    for (int64_t d = 0; d < dims_; d += kLanes) {
      const float* key = &keys_[(d / kLanes * kTile + j) * kLanes];
      for (int64_t e = 0; e < kLanes; ++e) {
        __builtin_prefetch(next_.values[j + e] + d);
        const Floats q = query[d + e];
#pragma GCC unroll 16
        for (int64_t n = 0; n < kLanes; ++n) sums[n] += q * key[n * kLanes + e];
      }
    }
    for (int64_t n = 0; n < kLanes; ++n) scores[j + n] = sums[n];
  }

  void mask(Ints positions, int64_t key, int64_t count, Floats* scores) const {
    const int64_t window = a_.sliding_window, last = length_ + a_.block - 1;
    const bool all_near = window == 0 || (last - key < window && key + count - 1 - length_ < window);
    const bool all_before = !a_.causal || key + count - 1 <= length_;
    if (all_near && all_before) return;
    for (int64_t j = 0; j < count; ++j) {
      const Ints distance = positions - static_cast<int32_t>(key + j);
      const Ints size = distance < 0 ? -distance : distance;
      Ints masked = Ints{};
      if (window != 0) masked |= size >= static_cast<int32_t>(min(window, INT32_MAX));
      if (a_.causal) masked |= distance < 0;
      scores[j] = masked ? Floats{} - INFINITY : scores[j];
    }
  }

  void accumulate_values(Floats* output, Floats rescale, const Floats* weights, int64_t d, int64_t count) const {
    Floats sums[kLanes];
#pragma GCC unroll 16
    for (int64_t n = 0; n < kLanes; ++n) sums[n] = output[n] * rescale;
    for (int64_t j = 0; j < count; ++j) {
      const Floats weight = weights[j];
      __builtin_prefetch(next_.keys[j] + d);
      const float* value = tile_.values[j] + d;
      asm("" : "+r"(value));  // otherwise GCC 12 spills each n's offset from the row
#pragma GCC unroll 16
      for (int64_t n = 0; n < kLanes; ++n) sums[n] += weight * value[n];
    }
#pragma GCC unroll 16
    for (int64_t n = 0; n < kLanes; ++n) output[n] = sums[n];
  }

  void write_outputs() {
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t head = g_ * group_ + r / a_.block, s = r % a_.block, i = r / kLanes, lane = r % kLanes;
      float* out = a_.out + ((b_ * a_.block + s) * a_.num_heads + head) * D_;
      const float factor = 1.0f / lanes_[i].sum[lane];
      const float* column = reinterpret_cast<const float*>(&outputs_[i * dims_]) + lane;
      for (int64_t d = 0; d < D_; ++d) out[d] = column[d * kLanes] * factor;
    }
  }

  const BlockAttention& a_;
  const int64_t b_, g_, D_, dims_, group_, rows_, length_, num_lanes_;
  Lanes* lanes_;
  Floats* queries_;  // [lanes, dims], premultiplied by the softmax scale
  Floats* outputs_;  // [lanes, dims], not yet divided by the sums
  float *keys_, *values_, *block_keys_,
      *row_;  // [D / kLanes, tile, kLanes], [tile, dims] where D needs it, [block, D], [D]
  Tile tile_;
  Tile next_;  // cache lines to prefetch while the tile is computed
};

}  // namespace
}  // namespace dflash
