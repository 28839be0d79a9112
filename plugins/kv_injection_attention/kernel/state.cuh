// SPDX-License-Identifier: Apache-2.0
// Online softmax state of a warp's query rows, and its update by 16 keys.
#pragma once

#include "kv_injection_attention/kernel/fragments.cuh"
#include "kv_injection_attention/kernel/launch_config.h"
#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// Below every score but finite: a row that has seen no key has weight exp2(kInitialMaximum - maximum) = 0.
inline constexpr float kInitialMaximum = -1e30f;
// The running maximum is raised, and the state rescaled, only if a weight relative to it exceeds this, which is far
// below FP16's limit.
inline constexpr float kMaxWeight = 256.0f;

// Laid out as by mma_m16n8k16(): a thread has columns 2 (lane % 4) and 2 (lane % 4) + 1 of rows lane / 4 and lane / 4 +
// 8.
template <int D, int kTiles>
struct State {
  float output[kTiles][D / 8][4] = {};
  // Negated maximum of each row in log2 units, from which the accumulators of the scores start. Equal in the four lanes
  // of a row.
  float negated_maximum[kTiles][4];
  float sum[kTiles][2] = {};  // over this thread's columns only

  DFLASH_DEVICE State() {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) negated_maximum[t][i] = -kInitialMaximum;
    }
  }

  DFLASH_DEVICE float maximum(int t, int half) const { return -negated_maximum[t][2 * half]; }

  DFLASH_DEVICE void scale_outputs(float rescale) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) output[t][n][i] *= rescale;
      }
    }
  }

  // Raises the maximum of a row to at least `least`. Both copies are updated independently: if one were derived from
  // the other, the compiler would keep one and assemble the four values of `negated_maximum` for every product.
  DFLASH_DEVICE void raise_maximum(int t, int half, float least) {
    const float before = negated_maximum[t][2 * half];
#pragma unroll
    for (int i = 0; i < 2; ++i) negated_maximum[t][2 * half + i] = fminf(negated_maximum[t][2 * half + i], -least);
    const float rescale = ex2_approx(negated_maximum[t][2 * half] - before);
    sum[t][half] *= rescale;
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      output[t][n][2 * half] *= rescale;
      output[t][n][2 * half + 1] *= rescale;
    }
  }
};

// The queries of a warp's tiles. The first tiles of 32 columns of each row stay in registers; the others are read on
// every use.
template <int D, int kTiles>
class Queries {
 public:
  // `rows` is the address of the first row.
  DFLASH_DEVICE Queries(Shared rows, int lane) : rows_(rows), lane_(lane) {
#pragma unroll
    for (int i = 0; i < kRegisterTiles; ++i) read(register_tiles_[i], i);
  }

  // Columns 32 i to 32 i + 31 of the first `kFirst` tiles.
  template <int kFirst>
  DFLASH_DEVICE void get(uint32_t (&a)[kFirst][2][4], int i) const {
    if (i >= kRegisterTiles) return read(a, i);
#pragma unroll
    for (int t = 0; t < kFirst; ++t) {
#pragma unroll
      for (int j = 0; j < 8; ++j) a[t][j / 4][j % 4] = register_tiles_[i][t][j / 4][j % 4];
    }
  }

 private:
  // The largest number that fits into registers next to the outputs without spilling.
  static constexpr int kRegisterTiles = D <= 96 ? D / 32 : kArchitecture == 80 ? 1 : 2;

  template <int kFirst>
  DFLASH_DEVICE void read(uint32_t (&a)[kFirst][2][4], int i) const {
#pragma unroll
    for (int t = 0; t < kFirst; ++t) {
      load_left(a[t], rows_ + t * 16 * row_bytes(D, 2), row_bytes(D, 2), i * 32, lane_);
    }
  }

  Shared rows_;
  int lane_;
  uint32_t register_tiles_[kRegisterTiles][kTiles][2][4];
};

inline constexpr int kMmaKeys = 16;

// The first `kTiles` of the `kHeld` tiles of a warp's queries against 16 keys and values in shared memory.
// Score and Value are the formats of the two products; kFp8 says that the rows are E4M3.
template <int D, int kTiles, int kHeld, class Score, class Value, bool kFp8>
struct Block {
  using Rows = StoredRows<D*(kFp8 ? 1 : 2)>;

  float score[kTiles][2][4];  // later the weights
  int lane;

  DFLASH_DEVICE explicit Block(int lane_index) : lane(lane_index) {}

  // Scores in units of log2, each less its row's maximum if `relative`.
  DFLASH_DEVICE void multiply_keys(const Queries<D, kHeld>& queries, Shared keys, const State<D, kHeld>& state,
                                   bool relative) {
    float begin[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int j = 0; j < 4; ++j) begin[t][j] = relative ? state.negated_maximum[t][j] : 0;
    }
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      uint32_t a[kTiles][2][4], b[2][2][2];
      queries.get(a, i);
      load_keys<kFp8, Rows>(b, keys, i * 32, lane);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float (&to)[4] = score[t][j % 2];
          if (i > 0 || j > 1) {
            mma_m16n8k16(Score{}, to, a[t][j / 2], b[j / 2][j % 2], to);
          } else {
            mma_m16n8k16(Score{}, to, a[t][0], b[0][j], begin[t]);
          }
        }
      }
    }
  }

  // Masks the keys outside [first(t, half), end(t, half)), counted from the first of the 16.
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

  // Turns scores, already relative to the maximum, into weights. Returns false and leaves the state unchanged if the
  // maximum has to be raised first. Comparisons ignore NaN, so a NaN score reaches the output.
  DFLASH_DEVICE bool try_softmax_weights(State<D, kHeld>& state) {
    float sum[kTiles][2];
    bool exceeds = false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 8; ++i) score[t][i / 4][i % 4] = ex2_approx(score[t][i / 4][i % 4]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float *x = &score[t][0][2 * half], *y = &score[t][1][2 * half];
        sum[t][half] = (x[0] + x[1]) + (y[0] + y[1]);
        exceeds |= sum[t][half] > kMaxWeight;
      }
    }
    if (any_sync(exceeds)) return false;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) state.sum[t][half] += sum[t][half];
    }
    return true;
  }

  // Turns absolute scores times `factor` into weights, after raising the maxima to the largest score so far.
  DFLASH_DEVICE void rescale_and_softmax_weights(State<D, kHeld>& state, float factor) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float *x = &score[t][0][2 * half], *y = &score[t][1][2 * half];
        float largest = fmaxf(fmaxf(x[0], x[1]), fmaxf(y[0], y[1])) * factor;
        largest = fmaxf(largest, shfl_xor_sync(largest, 1));
        largest = fmaxf(largest, shfl_xor_sync(largest, 2));
        state.raise_maximum(t, half, largest);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          x[i] = ex2_approx(x[i] * factor + state.negated_maximum[t][2 * half]);
          y[i] = ex2_approx(y[i] * factor + state.negated_maximum[t][2 * half]);
        }
        state.sum[t][half] += (x[0] + x[1]) + (y[0] + y[1]);
      }
    }
  }

  DFLASH_DEVICE void add_values(State<D, kHeld>& state, Shared values) {
    uint32_t weights[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &score[t][i / 2][i % 2 * 2];
        weights[t][i] = cvt_rn_x2(Value{}, pair[0], pair[1]);
      }
    }
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      uint32_t b[4][2];
      load_values<kFp8, Rows>(b, values, i * 32, lane);
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float (&to)[4] = state.output[t][4 * i + n];
          mma_m16n8k16(Value{}, to, weights[t], b[n], to);
        }
      }
    }
  }
};

}  // namespace dflash::kv_injection
