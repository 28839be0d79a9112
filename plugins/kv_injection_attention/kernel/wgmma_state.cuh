// SPDX-License-Identifier: Apache-2.0
// Online softmax state of a CTA's query rows in one warpgroup, and its update by 64 keys.
//
// Operands are swapped: keys are the rows and queries the columns of the scores, head_dim the rows and queries the
// columns of the outputs. wgmma's M of 64 is therefore always full, a cache row is read from shared memory and widened
// once, and the same threads hold a query's maximum, sum and output in both products:
//   scores [64 keys, N queries]   = K [64, D] * Q [N, D]^T          K in registers, Q in shared memory
//   outputs [D, N queries]       += V [64, D]^T * weights [N, 64]^T  V in registers, weights in shared memory
// With an FP8 cache, key products are E4M3 products: keys unchanged, queries rounded (see round_queries). Values are
// widened to F16, because wgmma takes 8-bit operands only K-major, and V is M-major.
// A thread has columns 8 j + 2 (lane % 4) + i of a product, i in {0, 1}, of rows 16 warp + lane / 4 (+ 8).
#pragma once

#include "kv_injection_attention/kernel/exp2.cuh"
#include "kv_injection_attention/kernel/fragments.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"
#include "kv_injection_attention/kernel/state.cuh"
#include "kv_injection_attention/kernel/wgmma.cuh"
#include "kv_injection_attention/kernel/wgmma_launch_config.h"

namespace dflash::kv_injection {

// Addresses of a warpgroup's operands, and this thread's place in it. Recomputed on every use to save registers.
// kFp8: the cache is E4M3.
template <int D, int N, bool kFp8, bool kAhead>
struct Warpgroup {
  static constexpr int kThreads = 32 * kWarpgroupWarps;
  static constexpr int kTeams = wgmma_teams(D, kAhead);
  static constexpr int kAllThreads = kTeams * kThreads;
  static constexpr int kWeightBytes = wgmma_weight_places(kAhead) * wgmma_weight_bytes(N);

  static DFLASH_DEVICE int lane() { return tid_x() & 31; }
  static DFLASH_DEVICE int warp() { return tid_x() / 32u % kWarpgroupWarps; }
  static DFLASH_DEVICE int team() { return tid_x() / unsigned{kThreads}; }
  static DFLASH_DEVICE int barrier() { return 1 + team(); }
  static DFLASH_DEVICE void sync() { bar_sync(barrier(), kThreads); }
  // The thread's first column and first row.
  static DFLASH_DEVICE int column() { return lane() % 4 * 2; }
  static DFLASH_DEVICE int row() { return warp() * 16 + lane() / 4; }

  // SwizzledRows [N, 64 columns], one matrix after the other.
  static DFLASH_DEVICE Shared queries() { return aligned_shared_memory(); }
  // SwizzledRows [N, D] of E4M3.
  static DFLASH_DEVICE Shared rounded_queries() { return queries() + wgmma_query_bytes(D, N, 2); }
  // SwizzledRows [N, 64 keys].
  static DFLASH_DEVICE Shared weights(int of_team) {
    return queries() + wgmma_query_bytes(D, N, kFp8 ? 1 : 2) + of_team * kWeightBytes;
  }
  // [warps][N] floats.
  static DFLASH_DEVICE Shared numbers() { return weights(kTeams) + team() * wgmma_number_bytes(N); }
  // [N] integers: the block slot of each query row.
  static DFLASH_DEVICE Shared slots() { return weights(kTeams) + kTeams * wgmma_number_bytes(N); }
  // The CTA's span, then the factor of the scores of rounded queries.
  static DFLASH_DEVICE StoredSpan span() { return {slots() + N * 4, slots() + N * 4 + 16}; }
  static DFLASH_DEVICE Shared score_factor() { return slots() + N * 4 + 32; }
};

// Loads a step's keys and values, rows of E4M3 or 16-bit elements, as left operands. A thread's offset is computed once
// for all steps: load_keys(a, rows + keys_at()).
template <int D, bool kFp8>
struct LeftOperands {
  static constexpr int kItem = kFp8 ? 1 : 2;
  using Rows = StoredRows<D * kItem>;
  static constexpr int kLoads = kFp8 ? 2 : 1;  // operands of V that one ldmatrix_x4 yields

  // Offset of the warp's 16 keys, for scores.
  static DFLASH_DEVICE Shared keys_at(int warp, int lane) { return Rows::at(warp * 16 + lane % 16, lane / 16 * 16); }

  // Each operand has 16 columns, or 32 of E4M3.
  template <int n>
  static DFLASH_DEVICE void load_keys(uint32_t (&a)[n][4], Shared at) {
#pragma unroll
    for (int i = 0; i < n; ++i) ldmatrix_x4(a[i], Rows::ahead(at, i * 32));
  }

  // Offset for outputs, whose rows are the warp's 16 of every 64 columns. With E4M3, the first eight are the even
  // columns and the others the odd ones.
  static DFLASH_DEVICE Shared values_at(int warp, int lane) {
    if (kFp8) return Rows::at(lane, warp * 16);
    return Rows::at(lane % 8 + lane / 16 * 8, warp * 32 + lane / 8 % 2 * 16);
  }

  // Each operand has 16 keys; all of them have 16 * kSteps.
  template <int kSteps>
  static DFLASH_DEVICE void load_values(uint32_t (&a)[D / 64 * kSteps][4], Shared at) {
#pragma unroll
    for (int tile = 0; tile < D / 64; ++tile) {
#pragma unroll
      for (int i = 0; i < kSteps / kLoads; ++i) {
        const Shared from = at + i * (16 * kLoads) * Rows::kStride + tile * 64 * kItem;
        if constexpr (kFp8) {
          uint32_t m[4];
          ldmatrix_x4_trans(m, from);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            // Bytes: key 0 even, key 0 odd, key 1 even, key 1 odd.
            uint32_t (&to)[4] = a[tile * kSteps + 2 * i + j / 2];
            cvt_f16x2_e4m3x2(to[j % 2 * 2], to[j % 2 * 2 + 1], prmt(m[j], 0, 0x3120));
          }
        } else {
          ldmatrix_x4_trans(a[tile * kSteps + i], from);
        }
      }
    }
  }
};

// Score and Value are the formats of the two products.
template <int D, int N, bool kFp8, bool kAhead>
struct WgmmaState {
  using Group = Warpgroup<D, N, kFp8, kAhead>;
  using Queries = SwizzledRows<128>;
  using RoundedQueries = SwizzledRows<D>;
  using Weights = SwizzledRows<128>;

  float output[D / 64][N / 2] = {};
  // Element 2 j + i is the negated maximum, in log2 units, of the thread's column 8 j + i; equal in all threads of a
  // column.
  float negated_maximum[N / 4];
  float sum[N / 4] = {};  // over this thread's rows only

  DFLASH_DEVICE WgmmaState() {
#pragma unroll
    for (int c = 0; c < N / 4; ++c) negated_maximum[c] = -kInitialMaximum;
  }

  // Index of a product's element: column c of the thread, in its first or second row.
  static DFLASH_DEVICE constexpr int at(int c, int half) { return c / 2 * 4 + half * 2 + c % 2; }

  DFLASH_DEVICE void scale_outputs(float rescale) {
#pragma unroll
    for (int tile = 0; tile < D / 64; ++tile) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) output[tile][i] *= rescale;
    }
  }

  // Raises the maximum of a column to at least `least`.
  DFLASH_DEVICE void raise_maximum(int c, float least) {
    const float before = negated_maximum[c];
    negated_maximum[c] = fminf(before, -least);
    const float rescale = ex2_approx(negated_maximum[c] - before);
    sum[c] *= rescale;
#pragma unroll
    for (int tile = 0; tile < D / 64; ++tile) {
      output[tile][at(c, 0)] *= rescale;
      output[tile][at(c, 1)] *= rescale;
    }
  }

  // Initial value of the score accumulators.
  DFLASH_DEVICE void load_negated_maxima(float (&score)[N / 2]) const {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) score[i] = negated_maximum[i / 4 * 2 + i % 2];
  }

  // Adds the products with the queries' columns from 16 * `first` on; without `add`, overwrites the scores.
  template <class Score, int n>
  static DFLASH_DEVICE void multiply_keys(float (&score)[N / 2], uint32_t (&keys)[n][4], int first, bool add) {
    fence_registers(score);
    fence_registers(keys);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const int at = first + i;
      const uint64_t queries = Queries::descriptor(Group::queries() + at / 4 * (N * Queries::kRow));
      wgmma(Score{}, score, keys[i], queries + at % 4 * kDescribedColumns, i > 0 || add);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    fence_registers(score);
  }

  // Starts the products of E4M3 keys with the rounded queries. They accumulate from 0, not from the negated maximum,
  // which may be the largest summand: Hopper aligns FP8 products to the largest one and keeps at most 13 bits below its
  // leading bit (DeepSeek-V3, arXiv 2412.19437, 3.5.2).
  static DFLASH_DEVICE void start_key_bytes(float (&score)[N / 2], uint32_t (&keys)[D / 32][4]) {
    fence_registers(keys);
    wgmma_fence();
    const uint64_t queries = RoundedQueries::descriptor(Group::rounded_queries());
#pragma unroll
    for (int i = 0; i < D / 32; ++i) wgmma(E4M3{}, score, keys[i], described_bytes(queries, i), i > 0);
    wgmma_commit_group();
  }
  // The descriptor of product i. It carries nothing into the upper word. With head_dim 64, a sum of lower words saves
  // three instructions per step (nvcc 13.0); with 128 it costs three.
  static DFLASH_DEVICE uint64_t described_bytes(uint64_t first, int i) {
    const uint64_t columns = i * kDescribedColumns;
    return D == 64 ? first >> 32 << 32 | static_cast<uint32_t>(first + columns) : first + columns;
  }
  // Waits for them; `pending` groups of products were started after them.
  template <int pending>
  static DFLASH_DEVICE void finish_key_bytes(float (&score)[N / 2]) {
    wgmma_wait_group<pending>();
    fence_registers(score);
  }

  // Turns these products into scores, relative to the maximum unless it will be raised.
  template <bool kRaise>
  DFLASH_DEVICE void scale_scores(float (&score)[N / 2], float factor) const {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      score[i] = kRaise ? score[i] * factor : fma_rn(score[i], factor, negated_maximum[i / 4 * 2 + i % 2]);
    }
  }

  // Raises the maxima to the largest scores of all warps and subtracts them from the scores. Maxima ignore NaN; it is
  // written to the sums, because exp2_by_polynomial() would turn it into a weight of 0.
  DFLASH_DEVICE void raise_maxima(float (&score)[N / 2], Group group) {
    const Shared mine = group.numbers() + (group.warp() * N + group.column()) * 4;
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
      float largest = fmaxf(score[at(c, 0)], score[at(c, 1)]);
      const bool numbers = score[at(c, 0)] == score[at(c, 0)] && score[at(c, 1)] == score[at(c, 1)];
      if (!numbers) sum[c] = as_float(0x7fc00000u);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor_sync(largest, mask));
      if (group.lane() < 4) st_shared(mine + (c / 2 * 8 + c % 2) * 4, as_bits(largest));
    }
    group.sync();
    const Shared all = group.numbers() + group.column() * 4;
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
      float largest = kInitialMaximum;
#pragma unroll
      for (int warp = 0; warp < kWarpgroupWarps; ++warp) {
        largest = fmaxf(largest, as_float(ld_shared(all + (warp * N + c / 2 * 8 + c % 2) * 4)));
      }
      raise_maximum(c, largest);
      score[at(c, 0)] += negated_maximum[c];
      score[at(c, 1)] += negated_maximum[c];
    }
  }

  // Address in shared memory of the weights that softmax_weights() stores for a thread.
  static DFLASH_DEVICE Shared weights_at(int warp, int lane) {
    const int chunk = (warp * 2 + lane / 8 % 2) ^ lane % 8;  // chunk of the row's 8, in swizzled order
    return Group::weights(Group::team()) + (lane / 16 * 8 + lane % 8) * Weights::kRow + chunk * 16;
  }

  // Every kMufuRun-th exponential of a thread is computed by a polynomial. Only with 80 rows and keys of 64 bytes would
  // the exponential unit be the bottleneck.
  static constexpr int kMufuRun = kFp8 && D == 64 && N == 80 ? 13 : N;

  // Turns scores into weights, which it stores in shared memory. Sets the sums over the thread's rows and returns
  // whether one of them is too large or NaN.
  template <class Value>
  DFLASH_DEVICE bool softmax_weights(float (&score)[N / 2], float (&sums)[N / 4], Shared to) const {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      score[i] = i % kMufuRun == kMufuRun - 1 ? exp2_by_polynomial(score[i]) : ex2_approx(score[i]);
    }
    int largest = 0;  // maximum of the sums' bits, which order like the numbers, with NaN above all
#pragma unroll
    for (int c = 0; c < N / 4; ++c) sums[c] = score[at(c, 0)] + score[at(c, 1)];
#pragma unroll
    for (int c = 0; c < N / 4; c += 2) largest = vimax3(largest, as_bits(sums[c]), as_bits(sums[c + 1]));
#pragma unroll
    for (int i = 0; i < N / 2; i += 8) {
      uint32_t m[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) m[j] = cvt_rn_x2(Value{}, score[i + 2 * j], score[i + 2 * j + 1]);
      stmatrix_x4_trans(to + i * 2 * Weights::kRow, m);
    }
    return largest > static_cast<int>(as_bits(kMaxWeight));
  }

  template <class Value, int kSteps>
  DFLASH_DEVICE void start_values(uint32_t (&values)[D / 64 * kSteps][4], Shared weights) {
    fence_registers(values);
#pragma unroll
    for (int tile = 0; tile < D / 64; ++tile) fence_registers(output[tile]);
    wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < D / 64; ++tile) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const uint64_t operand = Weights::descriptor(weights) + i * kDescribedColumns;
        wgmma(Value{}, output[tile], values[tile * kSteps + i], operand, true);
      }
    }
    wgmma_commit_group();
  }
  DFLASH_DEVICE void finish_values() {
    wgmma_wait_group<0>();
#pragma unroll
    for (int tile = 0; tile < D / 64; ++tile) fence_registers(output[tile]);
  }
};

}  // namespace dflash::kv_injection
