// SPDX-License-Identifier: Apache-2.0
// Tiles as in multiply.h, by dot products of pairs (VDPBF16PS), which flush subnormal numbers to 0. Both operands are
// read in place, 32 numbers at a time. oneDNN's brgemm reorders weights to pairs; here K is the inner index of both
// operands, so no reordering is needed.
#include "linear/bfloat16.h"
#include "linear/multiply.h"

namespace dflash {
namespace {

constexpr int64_t kStep = 32;
constexpr int64_t kSlice = 1024;  // numbers of a row at a time, so that a tile's numbers fit into the L1 cache
constexpr int64_t kSums = kMaxRows * kColumns;
constexpr int64_t kWholeSums =
    (kSums + kLanes - 1) / kLanes * kLanes;  // consecutive, aligned FLOAT vectors

inline __m512bh load_pairs(const uint16_t* at, int64_t count) {
  return (__m512bh)_mm512_maskz_loadu_epi16(~0u >> (kStep - count), at);
}

// Adds the products of numbers [k, end) to the sums of kRows rows of x and the first `columns` rows of a tile's weight.
template <int64_t kRows>
void add_products(const uint16_t* x, const uint16_t* weight, int64_t columns, int64_t K, int64_t k, int64_t end,
                  __m512* sums) {
  const uint16_t* rows[kColumns];
  for (int64_t n = 0; n < kColumns; ++n) rows[n] = weight + min(n, columns - 1) * K;
  __m512 acc[kRows * kColumns];
#pragma GCC unroll 32
  for (int64_t i = 0; i < kRows * kColumns; ++i) acc[i] = k == 0 ? __m512{} : sums[i];
  const auto add = [&](int64_t k, auto load) {
    __m512bh weights[kColumns];
#pragma GCC unroll 8
    for (int64_t n = 0; n < kColumns; ++n) weights[n] = load(rows[n] + k);
#pragma GCC unroll 8
    for (int64_t m = 0; m < kRows; ++m) {
      __m512bh row = load(x + m * K + k);
      asm("" : "+v"(row));  // otherwise GCC 12 reloads it for each product
#pragma GCC unroll 8
      for (int64_t n = 0; n < kColumns; ++n) {
        acc[m * kColumns + n] = _mm512_dpbf16_ps(acc[m * kColumns + n], row, weights[n]);
      }
    }
  };
  for (; k + kStep <= end; k += kStep) {
#pragma GCC unroll 8
    for (int64_t n = 0; n < kColumns; ++n) prefetch(rows[n] + kTilesAhead * kColumns * K + k);
    add(k, [](const uint16_t* at) { return (__m512bh)_mm512_loadu_si512(at); });
  }
  if (k < end) add(k, [&](const uint16_t* at) { return load_pairs(at, end - k); });
#pragma GCC unroll 32
  for (int64_t i = 0; i < kRows * kColumns; ++i) sums[i] = acc[i];
}

using AddProducts = void (*)(const uint16_t*, const uint16_t*, int64_t, int64_t, int64_t, int64_t, __m512*);

template <int64_t... kRows>
constexpr AddProducts products_of(int64_t rows, std::integer_sequence<int64_t, kRows...>) {
  constexpr AddProducts tiles[] = {add_products<kRows + 1>...};
  return tiles[rows - 1];
}

// Stores a tile's sums, each with its bias, rounded.
void write(const __m512* sums, const float* bias, int64_t rows, int64_t columns, int64_t N, uint16_t* out) {
  alignas(64) float numbers[kWholeSums];
  alignas(64) uint16_t bits[kWholeSums];
#pragma GCC unroll 8
  for (int64_t i = 0; i < rows * kColumns; i += 4) sum_four((const Floats*)sums + i, numbers + i);
  for (int64_t i = 0; i < rows * kColumns; i += kLanes) {
    const __m512 sum = _mm512_load_ps(numbers + i) + _mm512_load_ps(bias + i);
    _mm256_store_si256((__m256i*)(bits + i), (__m256i)_mm512_cvtneps_pbh(sum));
  }
  for (int64_t m = 0; m < rows; ++m) {
    if (columns == kColumns) {
      std::memcpy(out + m * N, bits + m * kColumns, sizeof(uint16_t) * kColumns);
    } else {
      copy(bits + m * kColumns, columns, out + m * N);
    }
  }
}

}  // namespace

void bfloat16_products(const Bfloat16Linear& layer, int64_t begin, int64_t end) {
  const int64_t M = layer.num_rows, N = layer.num_outputs, K = layer.num_inputs;
  const int64_t num_tiles = (M + kMaxRows - 1) / kMaxRows;
  alignas(64) float bias[kColumnsAtATime / kColumns][kWholeSums] = {};  // per number of a tile
  if (layer.bias != nullptr) {
    for (int64_t n = begin; n < end; ++n) {
      float* tile = bias[(n - begin) / kColumns];
      for (int64_t m = 0; m < kMaxRows; ++m) tile[m * kColumns + (n - begin) % kColumns] = to_float(layer.bias[n]);
    }
  }
  for (int64_t tile = 0; tile < num_tiles; ++tile) {
    const int64_t m = M * tile / num_tiles, rows = M * (tile + 1) / num_tiles - m;  // all nearly equal in size
    const AddProducts add = products_of(rows, std::make_integer_sequence<int64_t, kMaxRows>());
    __m512 sums[kColumnsAtATime / kColumns][kSums];
    for (int64_t k = 0; k < K; k += kSlice) {
      for (int64_t n = begin; n < end; n += kColumns) {
        add(layer.x + m * K, layer.weight + n * K, min(kColumns, end - n), K, k, min(K, k + kSlice),
            sums[(n - begin) / kColumns]);
      }
    }
    for (int64_t n = begin; n < end; n += kColumns) {
      const int64_t i = (n - begin) / kColumns;
      write(sums[i], bias[i], rows, min(kColumns, end - n), N, layer.out + m * N + n);
    }
  }
}

}  // namespace dflash
