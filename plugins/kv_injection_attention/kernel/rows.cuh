// SPDX-License-Identifier: Apache-2.0
// Loads the block's rows into shared memory: q and k normalised and rotated, v unchanged.
//
// An FP8 cache is widened in registers, where a lane's four consecutive bytes become two pairs. Its matrices therefore
// have their columns permuted within every 16, and so does every matching operand:
//   q and k (kPairs):  pair i of a lane's four elements goes to the half i of the 16
//   v (kEvenOdd):      even columns first, then odd
#pragma once

#include "kv_injection_attention/kernel/result.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"

namespace dflash::kv_injection {

enum class Columns { kPlain, kPairs, kEvenOdd };

// Stores eight elements, vector `index` of a row, in the order of `kColumns`.
template <Columns kColumns>
DFLASH_DEVICE void store_vector(Shared row, int index, const Words4& vector) {
  const Shared sixteen = row + (index / 2) * 32;
  const int half = index % 2;
  if constexpr (kColumns == Columns::kPlain) {
    for (int i = 0; i < 4; ++i) st_shared(row + index * 16 + i * 4, vector.word[i]);
  } else if constexpr (kColumns == Columns::kPairs) {
    for (int i = 0; i < 4; ++i) {
      const int lane_of_quad = half * 2 + i / 2;
      st_shared(sixteen + (i % 2) * 16 + lane_of_quad * 4, vector.word[i]);
    }
  } else {
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = vector.word[2 * i], high = vector.word[2 * i + 1];
      st_shared(sixteen + half * 8 + i * 4, prmt(low, high, 0x5410));
      st_shared(sixteen + 16 + half * 8 + i * 4, prmt(low, high, 0x7632));
    }
  }
}

template <class T>
DFLASH_DEVICE void widen(float (&values)[8], const Words4& vector) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = low_half_to_float(T{}, vector.word[i]);
    values[2 * i + 1] = high_half_to_float(T{}, vector.word[i]);
  }
}

template <class T>
DFLASH_DEVICE void add(float (&values)[8], const Words4& vector) {
  float others[8];
  widen<T>(others, vector);
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] += others[i];
}

template <class T>
DFLASH_DEVICE Words4 narrow(const float (&values)[8]) {
  Words4 vector;
#pragma unroll
  for (int i = 0; i < 4; ++i) vector.word[i] = cvt_rn_x2(T{}, values[2 * i], values[2 * i + 1]);
  return vector;
}

// Adds a bias to values; the sum is rounded once.
template <class T>
DFLASH_DEVICE Words4 add(const Words4& vector, const Words4& bias) {
  float values[8];
  widen<T>(values, vector);
  add<T>(values, bias);
  return narrow<T>(values);
}

// Position of a block slot's head in qkv, in rows of D. Heads are numbered query heads first, then key heads, then
// value heads. The largest call has 25 million rows.
DFLASH_DEVICE int64_t qkv_row(const Params& p, int request, int slot, int head) {
  return (request * p.block + slot) * (p.num_heads + 2 * p.num_kv_heads) + head;
}

// Source in global memory of the rows of one kind.
struct RowSource {
  const void* rows;
  const void* bias;  // per head; may be null
  const void* norm;
  float factor;    // factor of the result
  float unit = 1;  // a second factor: their product would occupy a register throughout
};

// One lane's 16 unprocessed elements of a row: eight of the first half and the eight that rotate with them, with their
// norm weights, cosines and sines. `part` is the lane's index among those that share the row.
struct RowVectors {
  Words4 first, second, bias_first, bias_second, norm_first, norm_second, cosine[2], sine[2];
};

// Loads vector `index` of a head's bias.
template <int D>
DFLASH_DEVICE Words4 load_bias(const void* bias, int head, int index) {
  return ld_global_v4(static_cast<const unsigned char*>(bias) + head * (D * 2) + index * 16);
}

// Loads a lane's part of row `row`, which belongs to `head`. All loads are issued before the first wait. Zeros unless
// the row is `real` and the lane has a part of it.
template <int D>
DFLASH_DEVICE RowVectors load_row(const RowSource& source, int64_t row, int head, const float* rope, int part,
                                  bool real) {
  constexpr int kHalf = D / 16;  // vectors of half a row
  RowVectors loaded{};
  if (!real || part >= kHalf) return loaded;
  const auto* vectors = static_cast<const unsigned char*>(source.rows) + row * D * 2;
  const auto* norms = static_cast<const unsigned char*>(source.norm);
  loaded.first = ld_global_v4(vectors + part * 16);
  loaded.second = ld_global_v4(vectors + (part + kHalf) * 16);
  if (source.bias != nullptr) {
    loaded.bias_first = load_bias<D>(source.bias, head, part);
    loaded.bias_second = load_bias<D>(source.bias, head, part + kHalf);
  }
  loaded.norm_first = ld_global_v4(norms + part * 16);
  loaded.norm_second = ld_global_v4(norms + (part + kHalf) * 16);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    loaded.cosine[i] = ld_global_v4(rope + part * 8 + i * 4);
    loaded.sine[i] = ld_global_v4(rope + D / 2 + part * 8 + i * 4);
  }
  return loaded;
}

// Normalises and rotates the row; `store(index, vector)` receives the lane's two vectors if the row is `stored`:
//   x = x + bias;  x = x / sqrt(mean(x^2) + eps) * norm * factor
//   first, second = first cos - second sin, second cos + first sin
// `kLanes` lanes share the row. Elements are T in global memory, Stored in shared memory.
template <int D, class T, class Stored, int kLanes, class Store>
DFLASH_DEVICE void norm_and_rotate(const RowVectors& loaded, const RowSource& source, float eps, int part, bool stored,
                                   Store store) {
  constexpr int kHalf = D / 16;
  float first[8], second[8], norm_first[8], norm_second[8], cosine[8], sine[8];
  widen<T>(first, loaded.first);
  widen<T>(second, loaded.second);
  if (source.bias != nullptr) {
    add<T>(first, loaded.bias_first);
    add<T>(second, loaded.bias_second);
  }
  widen<T>(norm_first, loaded.norm_first);
  widen<T>(norm_second, loaded.norm_second);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    cosine[i] = as_float(loaded.cosine[i / 4].word[i % 4]);
    sine[i] = as_float(loaded.sine[i / 4].word[i % 4]);
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += first[i] * first[i] + second[i] * second[i];
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) squares += shfl_xor_sync(squares, mask);
  const float inverse = rsqrt_approx(squares * (1.0f / D) + eps) * source.factor * source.unit;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = first[i] * inverse * norm_first[i], b = second[i] * inverse * norm_second[i];
    first[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
  if (part >= kHalf || !stored) return;
  store(part, narrow<Stored>(first));
  store(part + kHalf, narrow<Stored>(second));
}

// The block's rows of a CTA in the kernel for all architectures: `queries` query rows of a kv head from `first_row` on,
// then `keys` keys and `keys` values of the block; rows after the last are 0. `factor` and `unit` apply to queries, as
// in RowSource. All threads of the CTA must call.
template <int D, class T, class Stored, bool kFp8>
struct BlockRows {
  static constexpr int kLanes = D == 64 ? 4 : D == 256 ? 16 : 8;  // lanes per row: D / 16, rounded up to a power of 2
  static constexpr int kVectors = D / 8;

  const Params& p;
  const LaunchConfig& config;
  int request, kv_head, first_row, queries, keys;
  float factor, unit;

  // First input of store(), in flight while the context's pages are looked up.
  struct First {
    RowVectors row;
    Words4 value;
  };
  DFLASH_DEVICE First load() const { return {load_block_row(row_of_thread()), load_value(tid_x())}; }

  DFLASH_DEVICE void store(const First& first, Shared to_queries, Shared to_keys, Shared to_values) const {
    RowVectors row = first.row;
#pragma unroll 1
    for (int begin = 0; begin < queries + keys; begin += ntid_x() / kLanes) {
      const int i = begin + row_of_thread(), key = i - queries;
      const bool is_key = key >= 0;
      if (begin > 0) row = load_block_row(i);
      const Shared to = is_key ? to_keys + key * row_bytes(D, 2) : to_queries + i * row_bytes(D, 2);
      norm_and_rotate<D, T, Stored, kLanes>(row, source_of(i), p.rms_norm_eps, part(), key < keys,
                                            [&](int index, const Words4& vector) {
                                              store_vector<kFp8 ? Columns::kPairs : Columns::kPlain>(to, index, vector);
                                            });
    }
#pragma unroll 1
    for (int i = tid_x(); i < keys * kVectors; i += ntid_x()) {
      Words4 value = i < ntid_x() ? first.value : load_value(i);
      // Rows after slot S are never read, so the bias may be added there, too.
      if (p.qkv_bias != nullptr) value = add<T>(value, load_bias<D>(p.qkv_bias, value_head(), i % kVectors));
      store_vector<kFp8 ? Columns::kEvenOdd : Columns::kPlain>(to_values + i / kVectors * row_bytes(D, 2), i % kVectors,
                                                               value);
    }
  }

 private:
  static DFLASH_DEVICE int row_of_thread() { return tid_x() / kLanes; }
  static DFLASH_DEVICE int part() { return tid_x() % kLanes; }
  // Row i is a query row if below `queries`, else a key of the block.
  DFLASH_DEVICE RowSource source_of(int i) const {
    const bool is_key = i >= queries;
    return {p.qkv, p.qkv_bias, is_key ? p.k_norm : p.q_norm, is_key ? 1 : factor, is_key ? 1 : unit};
  }
  DFLASH_DEVICE RowVectors load_block_row(int i) const {
    const int key = i - queries, row = first_row + i;
    const bool is_key = key >= 0;
    const int slot = is_key ? key : row / config.group;
    const int head = is_key ? p.num_heads + kv_head : query_head(config, kv_head, row);
    const bool real = is_key ? slot < min(keys, p.block) : row < config.rows;
    return load_row<D>(source_of(i), qkv_row(p, request, slot, head), head, p.rope + (request * p.block + slot) * D,
                       part(), real);
  }
  DFLASH_DEVICE int value_head() const { return p.num_heads + p.num_kv_heads + kv_head; }
  // Loads vector i of the block's values; 0 after slot S.
  DFLASH_DEVICE Words4 load_value(int i) const {
    const int slot = i / kVectors;
    if (slot >= min(keys, p.block)) return {};
    const auto* from = static_cast<const unsigned char*>(p.qkv);
    return ld_global_v4(from + qkv_row(p, request, slot, value_head()) * D * 2 + i % kVectors * 16);
  }
};

}  // namespace dflash::kv_injection
