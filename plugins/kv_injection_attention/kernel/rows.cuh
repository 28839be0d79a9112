// SPDX-License-Identifier: Apache-2.0
// The block's rows on their way into shared memory: q and k normed and rotated, v as it is.
//
// An FP8 cache is widened in registers, where a lane's four consecutive bytes become two pairs. Its matrices
// therefore have their columns permuted within every 16, and so has everything that meets them:
//   q and k (kPairs):  pair i of a lane's four elements goes to the half i of the 16
//   v (kEvenOdd):      even columns first, then odd
#pragma once

#include "kv_injection_attention/kernel/plan.h"
#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

enum class Columns { kPlain, kPairs, kEvenOdd };

// Stores eight elements, vector `index` of a row, in the order of `kColumns`.
template <Columns kColumns>
DFLASH_DEVICE void store_vector(Shared row, int index, const Words& vector) {
  const Shared sixteen = row + (index / 2) * 32;
  const int half = index % 2;
  if constexpr (kColumns == Columns::kPlain) {
    for (int i = 0; i < 4; ++i) store_word(row + index * 16 + i * 4, vector.word[i]);
  } else if constexpr (kColumns == Columns::kPairs) {
    for (int i = 0; i < 4; ++i) {
      const int lane_of_quad = half * 2 + i / 2;
      store_word(sixteen + (i % 2) * 16 + lane_of_quad * 4, vector.word[i]);
    }
  } else {
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = vector.word[2 * i], high = vector.word[2 * i + 1];
      store_word(sixteen + half * 8 + i * 4, permute_bytes(low, high, 0x5410));
      store_word(sixteen + 16 + half * 8 + i * 4, permute_bytes(low, high, 0x7632));
    }
  }
}

template <class T>
DFLASH_DEVICE void widen(float (&values)[8], const Words& vector) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = first_of(T{}, vector.word[i]);
    values[2 * i + 1] = second_of(T{}, vector.word[i]);
  }
}

template <class T>
DFLASH_DEVICE Words narrow(const float (&values)[8]) {
  Words vector;
#pragma unroll
  for (int i = 0; i < 4; ++i) vector.word[i] = pack(T{}, values[2 * i], values[2 * i + 1]);
  return vector;
}

DFLASH_DEVICE void load_floats(float (&values)[8], const float* from) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const Words vector = load_words(from + 4 * i);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[4 * i + j] = as_float(vector.word[j]);
  }
}

// Where a head of a block slot stands in qkv, in rows of D; key heads are counted behind the query heads, and value
// heads behind those. All rows of the largest call are 25 million.
DFLASH_DEVICE int64_t qkv_row(const Params& p, int request, int slot, int head) {
  return (request * p.block + slot) * (p.num_heads + 2 * p.num_kv_heads) + head;
}

// Where the rows of one kind come from, in global memory.
struct RowSource {
  const void* rows;
  const void* norm;
  float factor;    // of the result
  float unit = 1;  // and another: a product of the two would be kept in a register all the while
};

// One lane's 16 elements of a row: eight of the first half, and the eight that rotate with them.
//   x = x / sqrt(mean(x^2) + eps) * norm * factor;  first, second = first cos - second sin, second cos + first sin
// `kLanes` lanes share the row, `part` says which this is. Elements are T in global memory, Stored in shared memory.
// Everything is loaded before anything is waited for. A row that is not `real` becomes 0.
template <int D, class T, class Stored, Columns kColumns, int kLanes>
DFLASH_DEVICE void norm_and_rotate(RowSource source, int64_t row, const float* rope, float eps,
                                   int part, bool stored, bool real, Shared to) {
  constexpr int kHalf = D / 16;  // vectors of half a row
  const bool mine = part < kHalf && stored;
  float first[8] = {}, second[8] = {}, norm_first[8] = {}, norm_second[8] = {}, cosine[8] = {}, sine[8] = {};
  if (real && mine) {
    const auto* vectors = static_cast<const unsigned char*>(source.rows) + row * D * 2;
    const auto* norms = static_cast<const unsigned char*>(source.norm);
    widen<T>(first, load_words(vectors + part * 16));
    widen<T>(second, load_words(vectors + (part + kHalf) * 16));
    widen<T>(norm_first, load_words(norms + part * 16));
    widen<T>(norm_second, load_words(norms + (part + kHalf) * 16));
    load_floats(cosine, rope + part * 8);
    load_floats(sine, rope + D / 2 + part * 8);
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares += first[i] * first[i] + second[i] * second[i];
#pragma unroll
  for (int mask = 1; mask < kLanes; mask *= 2) squares += from_lane_xor(squares, mask);
  const float inverse = inverse_sqrt(squares * (1.0f / D) + eps) * source.factor * source.unit;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = first[i] * inverse * norm_first[i], b = second[i] * inverse * norm_second[i];
    first[i] = a * cosine[i] - b * sine[i];
    second[i] = b * cosine[i] + a * sine[i];
  }
  if (!mine) return;
  store_vector<kColumns>(to, part, narrow<Stored>(first));
  store_vector<kColumns>(to, part + kHalf, narrow<Stored>(second));
}

// The rows of a CTA's queries, or of the block's keys. `locate(i, &row, &slot)` says where row i stands in global
// memory, in rows of D, and which block slot it is; false for a row of padding, which becomes 0.
template <int D, class T, class Stored, Columns kColumns, class Locate>
DFLASH_DEVICE void store_rotated_rows(RowSource source, const float* rope, float eps, int rows,
                                      Shared to, Locate locate) {
  constexpr int kLanes = D == 64 ? 4 : D == 256 ? 16 : 8;  // D / 16, or the power of 2 above
  const int thread = thread_index(), part = thread % kLanes;
  const int at_once = thread_count() / kLanes;
#pragma unroll 1
  for (int begin = 0; begin < rows; begin += at_once) {
    const int i = begin + thread / kLanes;
    int64_t row = 0;
    int slot = 0;
    const bool stored = i < rows;
    const bool real = stored && locate(i, row, slot);
    norm_and_rotate<D, T, Stored, kColumns, kLanes>(source, row, rope + int64_t{slot} * D, eps,
                                                    part, stored, real, to + i * row_bytes(D, 2));
  }
}

}  // namespace dflash::kv_injection
