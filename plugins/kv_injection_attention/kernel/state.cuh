// SPDX-License-Identifier: Apache-2.0
// The running attention of a warp's query rows, and how 16 more keys enter it.
#pragma once

#include "kv_injection_attention/kernel/fragments.cuh"
#include "kv_injection_attention/kernel/plan.h"
#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// Below every score, and finite: a row that has seen nothing has weight exp2(kNothing - maximum) = 0.
inline constexpr float kNothing = -1e30f;
// Scores may exceed the maximum that they are taken relative to by this much: their exp2 stays below 256, far from
// FP16's limit, and the maximum, with everything scaled by it, need not move at every step.
inline constexpr float kSlack = 8.0f;

// Of the multiply() layout: a thread has columns 2 (lane % 4) and the next of rows lane / 4 and lane / 4 + 8.
template <int D>
struct State {
  static constexpr int kTiles = warp_tiles(D);

  float output[kTiles][D / 8][4] = {};
  float maximum[kTiles][2];   // in units of log2, the same in the four lanes of a row
  float sum[kTiles][2] = {};  // of this thread's columns only

  DFLASH_DEVICE State() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) maximum[t][0] = maximum[t][1] = kNothing;
  }

  DFLASH_DEVICE void scale_outputs(float by) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[t][n][i] *= by;
      }
    }
  }

  // From each thread's part to the row's sum.
  DFLASH_DEVICE void finish_sums() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[t][half] += from_lane_xor(sum[t][half], 1);
        sum[t][half] += from_lane_xor(sum[t][half], 2);
      }
    }
  }

  // Makes `to` the maximum of a row.
  DFLASH_DEVICE void move_maximum(int t, int half, float to) {
    const float by = exp2_fast(maximum[t][half] - to);
    maximum[t][half] = to;
    sum[t][half] *= by;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      output[t][n][2 * half] *= by;
      output[t][n][2 * half + 1] *= by;
    }
  }
};

// The queries of a warp's rows: of each row the first columns in registers, the others read again at every step.
template <int D>
class Queries {
 public:
  static constexpr int kTiles = warp_tiles(D);

  // `rows` is the address of the first; `tiles` of the kTiles tiles exist.
  DFLASH_DEVICE Queries(Shared rows, int tiles, int lane)
      : rows_(rows), tiles_(tiles), lane_(lane) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) read(held_[i], i);
  }

  // Columns 32 i to 32 i + 31.
  DFLASH_DEVICE void get(uint32_t (&a)[kTiles][2][4], int i) const {
    if (i >= kHeld) return read(a, i);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 8; ++j) a[t][j / 4][j % 4] = held_[i][t][j / 4][j % 4];
    }
  }

 private:
  // As many as the registers beside the outputs hold without spilling.
  static constexpr int kHeld = D <= 96 ? D / 32 : 2;

  DFLASH_DEVICE void read(uint32_t (&a)[kTiles][2][4], int i) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t < tiles_) load_left(a[t], rows_ + t * 16 * row_bytes(D, 2), row_bytes(D, 2), i * 32, lane_);
    }
  }

  Shared rows_;
  int tiles_, lane_;
  uint32_t held_[kHeld][kTiles][2][4];
};

inline constexpr int kMatrixKeys = 16;

// The warp's queries against 16 keys and values in shared memory, row after row of `kStride` bytes.
// Score and Value are the formats of the two products; kBytes says that the rows are E4M3.
template <int D, class Score, class Value, bool kBytes>
struct Block {
  static constexpr int kTiles = warp_tiles(D);
  static constexpr int kStride = row_bytes(D, kBytes ? 1 : 2);

  float score[kTiles][2][4] = {};
  int tiles;  // of the warp; the others are left alone
  int lane;

  DFLASH_DEVICE Block(const Queries<D>& queries, Shared keys, int num_tiles, int lane_index)
      : tiles(num_tiles), lane(lane_index) {
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      uint32_t a[kTiles][2][4], b[2][2][2];
      queries.get(a, i);
      load_keys<kBytes>(b, keys, kStride, i * 32, lane);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (t >= tiles) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) multiply(Score{}, score[t][j % 2], a[t][j / 2], b[j / 2][j % 2]);
      }
    }
  }

  // Hides the keys outside [first(t, half), end(t, half)), counted from the first of the 16.
  template <class First, class End>
  DFLASH_DEVICE void mask(First first, End end) {
    const int lane_column = lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int from = first(t, half), to = end(t, half);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = j / 2 * 8 + lane_column + j % 2;
          if (column < from || column >= to) score[t][j / 2][2 * half + j % 2] = as_float(0xff800000u);
        }
      }
    }
  }

  // Scores become weights exp2(scale * score - maximum); the state's maxima move first if they must.
  DFLASH_DEVICE void weigh(State<D>& state, float scale) {
    float largest[kTiles][2];
    bool exceeds = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float *x = &score[t][0][2 * half], *y = &score[t][1][2 * half];
        largest[t][half] = fmaxf(fmaxf(x[0], x[1]), fmaxf(y[0], y[1])) * scale;
        exceeds |= largest[t][half] > state.maximum[t][half] + kSlack;
      }
    }
    if (any_lane(exceeds)) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float most = largest[t][half];
          most = fmaxf(most, from_lane_xor(most, 1));
          most = fmaxf(most, from_lane_xor(most, 2));
          state.move_maximum(t, half, fmaxf(most, state.maximum[t][half]));
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (t >= tiles) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int half = j / 2 % 2;
        float& x = score[t][j / 4][j % 4];
        x = exp2_fast(x * scale - state.maximum[t][half]);
        state.sum[t][half] += x;
      }
    }
  }

  DFLASH_DEVICE void add_values(State<D>& state, Shared values) {
    uint32_t weights[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &score[t][i / 2][i % 2 * 2];
        weights[t][i] = pack(Value{}, pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      uint32_t b[4][2];
      load_values<kBytes>(b, values, kStride, i * 32, lane);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        if (t >= tiles) continue;
#pragma unroll
        for (int n = 0; n < 4; ++n) multiply(Value{}, state.output[t][4 * i + n], weights[t], b[n]);
      }
    }
  }
};

}  // namespace dflash::kv_injection
