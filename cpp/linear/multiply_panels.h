// SPDX-License-Identifier: Apache-2.0
// The kernel for weights in panels. It is compiled once per instruction set, so everything here has internal linkage.
//
// The sums of a tile, rows of x by some panels, stay in registers. For each input the kernel reads one row of each
// panel and one number of each row of x, and accumulates all their products. Long rows are processed a slice at a time,
// with partial sums in out, so that a slice of the panels stays in a core's L2 cache for all tiles. In oneDNN's terms:
// brgemm on weights reordered to blocks of 16 outputs, blocked along K.
#pragma once

#include <utility>

#include "cpu/vectors.h"
#include "linear/panels.h"

namespace dflash {
namespace {

constexpr int64_t kVectors = kPanel / kLanes;  // inputs per slice of a panel
// A tile's sums and operands fit into the registers.
constexpr int64_t kTileRows = kLanes >= 8 ? 6 : 2;
constexpr int64_t kTilePanels = kLanes == 16 ? kPanelsAtATime : 1;
constexpr int64_t kInputsAtATime = 512;

inline Floats load_some(const float* at, int64_t count) {
  if (count >= kLanes) return load(at);
  float values[kLanes] = {};
  copy(at, max(count, 0), values);
  return load(values);
}

inline void store_some(Floats vector, float* at, int64_t count) {
  if (count >= kLanes) return store(vector, at);
  float values[kLanes];
  store(vector, values);
  copy(values, max(count, 0), at);
}

// Adds the products of inputs [begin, end) to the numbers of rows m, m + 1, ... by panels `panel`, `panel` + 1, ...
template <int64_t kRows, int64_t kPanels>
void multiply_panel_tile(const PanelLinear& layer, int64_t m, int64_t panel, int64_t begin, int64_t end) {
  constexpr int64_t kWidth = kPanels * kVectors;
  const int64_t K = layer.num_inputs, N = layer.num_outputs, column = panel * kPanel, columns = N - column;
  float* out = layer.out + m * N + column;
  Floats sums[kRows][kWidth] = {};
  if (begin > 0) {
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t i = 0; i < kWidth; ++i) sums[r][i] = load_some(out + r * N + i * kLanes, columns - i * kLanes);
    }
  }
  const float* x = layer.x + m * K;
  const float* weight = layer.weight + panel * kPanel * K;
  for (int64_t k = begin; k < end; ++k) {
    Floats weights[kWidth];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kWidth; ++i) {
      weights[i] = load(weight + (i / kVectors * K + k) * kPanel + i % kVectors * kLanes);
    }
#pragma GCC unroll 16
    for (int64_t r = 0; r < kRows; ++r) {
      const Floats number = Floats{} + x[r * K + k];
#pragma GCC unroll 8
      for (int64_t i = 0; i < kWidth; ++i) sums[r][i] += number * weights[i];
    }
  }
  if (end == K && layer.bias != nullptr) {
    for (int64_t i = 0; i < kWidth; ++i) {
      const Floats bias = load_some(layer.bias + column + i * kLanes, columns - i * kLanes);
      for (int64_t r = 0; r < kRows; ++r) sums[r][i] += bias;
    }
  }
  for (int64_t r = 0; r < kRows; ++r) {
    for (int64_t i = 0; i < kWidth; ++i) store_some(sums[r][i], out + r * N + i * kLanes, columns - i * kLanes);
  }
}

using MultiplyPanelTile = void (*)(const PanelLinear&, int64_t, int64_t, int64_t, int64_t);

template <int64_t kPanels, int64_t... kRows>
constexpr MultiplyPanelTile panel_tile_of(int64_t rows, std::integer_sequence<int64_t, kRows...>) {
  constexpr MultiplyPanelTile tiles[] = {multiply_panel_tile<kRows + 1, kPanels>...};
  return tiles[rows - 1];
}

// Computes adjacent panels of out.
template <int64_t kPanels>
void multiply_all_rows(const PanelLinear& layer, int64_t panel) {
  const int64_t M = layer.num_rows, K = layer.num_inputs, num_tiles = (M + kTileRows - 1) / kTileRows;
  for (int64_t k = 0; k < K; k += kInputsAtATime) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t m = M * tile / num_tiles, rows = M * (tile + 1) / num_tiles - m;  // all nearly equal in size
      const MultiplyPanelTile multiply = panel_tile_of<kPanels>(rows, std::make_integer_sequence<int64_t, kTileRows>());
      multiply(layer, m, panel, k, min(K, k + kInputsAtATime));
    }
  }
}

inline void multiply_panels(const PanelLinear& layer, int64_t begin, int64_t end) {
  int64_t panel = begin;
  for (; panel + kTilePanels <= end; panel += kTilePanels) multiply_all_rows<kTilePanels>(layer, panel);
  for (; panel < end; ++panel) multiply_all_rows<1>(layer, panel);
}

}  // namespace
}  // namespace dflash
