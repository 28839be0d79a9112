// SPDX-License-Identifier: Apache-2.0
// The kernel. It is compiled once per instruction set, so everything here has internal linkage.
//
// Each output is a sum of products of vectors along K, the inner index of both operands. The sums of a tile, rows of x
// by kColumns rows of the weight, stay in registers, so each vector is read and decoded once per tile: the register
// blocking of oneDNN's brgemm with weights decompression, on plain (not reordered) weights.
#pragma once

#include <cstring>
#include <utility>

#include "cpu/scratch.h"
#include "cpu/vectors.h"
#include "linear/decode.h"
#include "linear/linear.h"

namespace dflash {
namespace {

constexpr int64_t kColumns = 3;
constexpr int64_t kTilesAhead = 3;                  // tiles ahead to prefetch weights for
constexpr int64_t kMaxRows = kLanes == 16 ? 8 : 4;  // sums and operands fit into the registers
// Columns that multiply_decoded() decodes at a time.
constexpr int64_t kDecoded = 12;

// The sums of four vectors.
inline void sum_four(const Floats* v, float* out) {
#if defined(__AVX512F__)
  // Combines halves of two vectors, then quarters of four: each sum is then spread over four adjacent lanes.
  const auto halves = [](Floats a, Floats b) {
    const __m512 first = _mm512_mask_mov_ps((__m512)a, 0xff00, (__m512)b);
    const __m512 second = _mm512_mask_mov_ps((__m512)b, 0xff00, (__m512)a);
    return first + _mm512_shuffle_f32x4(second, second, 0x4e);
  };
  const auto quarters = [](__m512 a, __m512 b) {
    const __m512 first = _mm512_mask_mov_ps(a, 0xf0f0, b), second = _mm512_mask_mov_ps(b, 0xf0f0, a);
    return first + _mm512_shuffle_f32x4(second, second, 0xb1);
  };
  __m512 sums = quarters(halves(v[0], v[1]), halves(v[2], v[3]));
  sums += _mm512_permute_ps(sums, 0x4e);
  sums += _mm512_permute_ps(sums, 0xb1);
  const __m512i places = _mm512_setr_epi32(0, 8, 4, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(places, sums)));
#elif defined(__AVX2__)
  const auto neighbours = [](Floats a, Floats b) { return _mm256_hadd_ps((__m256)a, (__m256)b); };
  const __m256 sums = _mm256_hadd_ps(neighbours(v[0], v[1]), neighbours(v[2], v[3]));
  _mm_storeu_ps(out, _mm256_castps256_ps128(sums) + _mm256_extractf128_ps(sums, 1));
#else
  for (int64_t i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
}

// Prefetches to L2: L1 has too few outstanding misses for full memory bandwidth (half of it on Zen 4).
inline void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// Multiplies kRows rows of x by the first `columns` of kColumns rows of the weight, from `codes` on.
template <int64_t kRows, class Row>
void multiply_tile(const Linear& linear, const float* x, const uint8_t* codes, const Row* decode, int64_t columns,
                   float* out) {
  constexpr int64_t kSums = kRows * kColumns, kFours = (kSums + 3) / 4 * 4;
  const int64_t K = linear.weight.cols, bytes = row_bytes(linear.weight.format, K);
  const uint8_t* rows[kColumns];
  for (int64_t n = 0; n < kColumns; ++n) rows[n] = codes + min(n, columns - 1) * bytes;
  const uint8_t* next = codes + kTilesAhead * kColumns * bytes;
  Floats sums[kFours] = {};
  const auto add = [&](const uint8_t* const* codes, const float* x, int64_t stride, int64_t k) {
    Floats weights[kColumns];
#pragma GCC unroll 8
    for (int64_t n = 0; n < kColumns; ++n) weights[n] = decode[n](codes[n], k);
#pragma GCC unroll 8
    for (int64_t m = 0; m < kRows; ++m) {
      Floats row = load(x + m * stride);
#if defined(__x86_64__)
      asm("" : "+v"(row));  // otherwise GCC 12 reloads it for each product
#endif
#pragma GCC unroll 8
      for (int64_t n = 0; n < kColumns; ++n) sums[m * kColumns + n] += row * weights[n];
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= K; k += kLanes) {
    for (int64_t byte = 0; byte < kColumns * Row::kBytes; byte += 64) prefetch(next + byte);
    next += kColumns * Row::kBytes;
    add(rows, x + k, K, k);
    for (int64_t n = 0; n < kColumns; ++n) rows[n] += Row::kBytes;
  }
  if (k < K) {  // the remainder, padded with zeros
    uint8_t rest[kColumns][Row::kBytes] = {};
    float x_rest[kRows * kLanes] = {};
    for (int64_t n = 0; n < kColumns; ++n) {
      std::memcpy(rest[n], rows[n], row_bytes(linear.weight.format, K - k));
      rows[n] = rest[n];
    }
    for (int64_t m = 0; m < kRows; ++m) copy(x + m * K + k, K - k, x_rest + m * kLanes);
    add(rows, x_rest, kLanes, k);
  }
  float numbers[kFours];
#pragma GCC unroll 8
  for (int64_t i = 0; i < kFours; i += 4) sum_four(sums + i, numbers + i);
  for (int64_t m = 0; m < kRows; ++m) copy(numbers + m * kColumns, columns, out + m * linear.out_stride);
}

template <class Row>
using MultiplyTile = void (*)(const Linear&, const float*, const uint8_t*, const Row*, int64_t, float*);

template <class Row, int64_t... kRows>
constexpr MultiplyTile<Row> tile_of(int64_t rows, std::integer_sequence<int64_t, kRows...>) {
  constexpr MultiplyTile<Row> tiles[] = {multiply_tile<kRows + 1, Row>...};
  return tiles[rows - 1];
}

// Computes at most kColumnsAtATime columns [begin, end) of out, tile by tile; `decoder(row)` is the Row of a row of the
// weight.
template <class Decoder>
void multiply_tiles(const Linear& linear, int64_t begin, int64_t end, const Decoder& decoder) {
  using Row = decltype(decoder(0));
  const int64_t M = linear.num_rows, K = linear.weight.cols, bytes = row_bytes(linear.weight.format, K);
  const int64_t num_tiles = (M + kMaxRows - 1) / kMaxRows;
  Row decode[kColumnsAtATime];
  for (int64_t i = 0; i < kColumnsAtATime; ++i) decode[i] = decoder(min(begin + i, end - 1));
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t m = M * tile / num_tiles, rows = M * (tile + 1) / num_tiles - m;  // all nearly equal in size
    const MultiplyTile<Row> multiply_tile = tile_of<Row>(rows, std::make_integer_sequence<int64_t, kMaxRows>());
    for (int64_t n = begin; n < end; n += kColumns) {
      multiply_tile(linear, linear.x + m * K, linear.weight.codes + n * bytes, decode + (n - begin),
                    min(kColumns, end - n), linear.out + m * linear.out_stride + n);
    }
  }
}

// Decodes weights to FLOAT in a core's cache, then multiplies.
template <class Decoder>
void multiply_decoded(const Linear& linear, int64_t begin, int64_t end, const Decoder& decoder) {
  const PackedWeight& weight = linear.weight;
  const int64_t K = weight.cols;
  float* values = scratch(kDecoded * K + kLanes, 1);
  store(Floats{}, values + kDecoded * K);  // a row's last vector may extend beyond the row
  for (int64_t first = begin; first < end; first += kDecoded) {
    const int64_t columns = min(kDecoded, end - first);
    for (int64_t n = 0; n < columns; ++n) {
      decode_row(row_codes(weight, first + n), K, decoder(first + n), &values[n * K]);
    }
    Linear decoded = linear;
    decoded.weight = {WeightFormat::kFloat, columns, K, reinterpret_cast<const uint8_t*>(values), nullptr, 1.0f};
    decoded.out += first;
    multiply_tiles(decoded, 0, columns, [](int64_t) { return FloatRow(); });
  }
}

template <class Decoder>
void multiply_with(const Linear& linear, int64_t begin, int64_t end, const Decoder& decoder) {
  if (kLanes < 16 && linear.num_rows > kMaxRows) {
    multiply_decoded(linear, begin, end, decoder);
  } else {
    multiply_tiles(linear, begin, end, decoder);
  }
}

inline void multiply(const Linear& linear, int64_t begin, int64_t end) {
  const PackedWeight& weight = linear.weight;
  switch (weight.format) {
    case WeightFormat::kFloat:
      return multiply_tiles(linear, begin, end, [](int64_t) { return FloatRow(); });
    case WeightFormat::kFloat16:
      return multiply_with(linear, begin, end, [](int64_t) { return Float16Row(); });
    case WeightFormat::kBfloat16:
      return multiply_with(linear, begin, end, [](int64_t) { return Bfloat16Row(); });
    case WeightFormat::kFp8:
      return multiply_with(linear, begin, end, [&](int64_t) { return Fp8Row{weight.scale}; });
    case WeightFormat::kInt4:  // rows of a pair share their bytes, which tiles do not support
      return multiply_decoded(linear, begin, end, [&](int64_t n) {
        return Int4Row{weight.block_scales + n * weight.cols / 32 * 4, n % 2 == 0 ? 0 : 4};
      });
    case WeightFormat::kNvfp4:
      break;
  }
  const int64_t stride = weight.cols / 16 / kLanes * kLanes + kLanes;
  float* block_scales = scratch((end - begin) * stride);
  std::memset(block_scales, 0, sizeof(float) * (end - begin) * stride);
  for (int64_t n = begin; n < end; ++n) decode_block_scales(weight, n, &block_scales[(n - begin) * stride]);
  multiply_with(linear, begin, end, [&](int64_t n) { return Nvfp4Row{&block_scales[(n - begin) * stride]}; });
}

}  // namespace
}  // namespace dflash
