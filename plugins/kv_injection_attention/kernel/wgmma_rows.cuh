// SPDX-License-Identifier: Apache-2.0
// Loads the block's rows in the sm_90a kernel and stores them where wgmma and ldmatrix read them.
#pragma once

#include <type_traits>

#include "kv_injection_attention/kernel/rows.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"
#include "kv_injection_attention/kernel/wgmma_state.cuh"

namespace dflash::kv_injection {

// All threads of the CTA must call. T is the block's format, N the launch's tile_rows.
template <int D, int N, class T, bool kFp8, bool kAhead>
class WgmmaRows {
  using Group = Warpgroup<D, N, kFp8, kAhead>;
  using State = WgmmaState<D, N, kFp8, kAhead>;
  using Score = std::conditional_t<kFp8, F16, T>;
  static constexpr int kStride = row_bytes(D, 2);
  static constexpr int kAllThreads = Group::kAllThreads, kWarps = kAllThreads / 32;
  // Lanes per row of the block, rows that all threads process at a time, and vectors of values per thread.
  static constexpr int kRowLanes = D / 16, kRowsAtOnce = kAllThreads / kRowLanes;
  static constexpr int kVectors = D / 8, kValueLoads = (kMaxBlock * kVectors + kAllThreads - 1) / kAllThreads;
  static_assert(Group::kTeams * wgmma_number_bytes(N) >= kWarps * 4);

 public:
  DFLASH_DEVICE WgmmaRows(const Params& p, const LaunchConfig& config) : p_(p), config_(config) {}

  // Input of the first pass of store(), in flight while the context's pages are looked up. It is all of the input if
  // each thread has one row.
  struct First {
    RowVectors row{};
    Words4 values[kValueLoads] = {};
    Words4 value_bias{};
  };
  DFLASH_DEVICE First load(int request, bool has_block) const {
    First loaded;
    loaded.row = load_block_row(request, tid_x() / kRowLanes, has_block ? N + p_.block : N);
    if (has_block) {
      load_block_values(request, loaded.values);
      loaded.value_bias = load_value_bias();
    }
    return loaded;
  }

  // Stores the queries as the swizzled rows that wgmma reads and, with the block, its keys and values. Keys after slot
  // S are not written, because attend_block() masks their scores. Values there are finite.
  DFLASH_DEVICE void store(const First& loaded, int request, bool has_block) const {
    const int rows = has_block ? N + p_.block : N, part = tid_x() % kRowLanes;
    float largest = 0;  // largest absolute value of the queries; ignores NaN
    RowVectors row = loaded.row;
#pragma unroll 1
    for (int begin = 0; begin < rows; begin += kRowsAtOnce) {
      const int i = begin + tid_x() / kRowLanes;
      const bool is_key = i >= N;
      if (begin > 0) row = load_block_row(request, i, rows);
      norm_and_rotate<D, T, Score, kRowLanes>(
          row, source_of(i), p_.rms_norm_eps, part, i < rows, [&](int index, const Words4& vector) {
            st_shared_v4(is_key ? block_keys() + (i - N) * kStride + index * 16 : query_at(i, index), vector);
            if constexpr (kFp8) {
              if (!is_key) largest = largest_of(vector, largest);
            }
          });
    }
    if (has_block) store_block_values(loaded.values, loaded.value_bias);
    if constexpr (kFp8) round_queries(largest_of_threads(largest));
  }

  DFLASH_DEVICE Shared block_keys() const { return aligned_shared_memory() + config_.block_at; }
  DFLASH_DEVICE Shared block_values() const { return block_keys() + kMaxBlock * kStride; }

 private:
  // Row i is a query row if below N, else a key of the block, if the CTA has it. Products of queries with context keys
  // are scores in log2 units.
  DFLASH_DEVICE RowSource source_of(int i) const {
    return {p_.qkv, p_.qkv_bias, i >= N ? p_.k_norm : p_.q_norm, i >= N ? 1 : config_.query_factor};
  }
  // This thread's part of row i of `rows`; zeros for a row of padding.
  DFLASH_DEVICE RowVectors load_block_row(int request, int i, int rows) const {
    const bool is_key = i >= N, real = i < rows && (is_key || i < config_.rows);
    if (!real) return {};
    const int slot = is_key ? i - N : static_cast<int>(ld_shared(Group::slots() + i * 4));
    const int head = is_key ? p_.num_heads + ctaid_x() : ctaid_x() * config_.group + i - slot * config_.group;
    const float* rope = p_.rope + (request * p_.block + slot) * D;
    return load_row<D>(source_of(i), qkv_row(p_, request, slot, head), head, rope, tid_x() % kRowLanes, true);
  }
  DFLASH_DEVICE int value_head() const { return p_.num_heads + p_.num_kv_heads + ctaid_x(); }
  DFLASH_DEVICE void load_block_values(int request, Words4 (&values)[kValueLoads]) const {
#pragma unroll
    for (int j = 0; j < kValueLoads; ++j) {
      const int i = tid_x() + j * kAllThreads;
      if (i >= p_.block * kVectors) continue;  // values after slot S stay 0, or become the bias
      const int64_t row = qkv_row(p_, request, i / kVectors, value_head());
      values[j] = ld_global_v4(static_cast<const unsigned char*>(p_.qkv) + row * D * 2 + i % kVectors * 16);
    }
  }
  // Bias of a thread's values, which are the same columns of several slots.
  DFLASH_DEVICE Words4 load_value_bias() const {
    static_assert(kAllThreads % kVectors == 0);
    return p_.qkv_bias != nullptr ? load_bias<D>(p_.qkv_bias, value_head(), tid_x() % kVectors) : Words4{};
  }

  // Address of vector `index` of a query row.
  static DFLASH_DEVICE Shared query_at(int row, int index) {
    return Group::queries() + index / 8 * (N * State::Queries::kRow) +
           State::Queries::swizzle(row * State::Queries::kRow + index % 8 * 16);
  }
  static DFLASH_DEVICE float largest_of(const Words4& vector, float largest) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      largest = fmaxf(largest, fabsf(low_half_to_float(F16{}, vector.word[j])));
      largest = fmaxf(largest, fabsf(high_half_to_float(F16{}, vector.word[j])));
    }
    return largest;
  }
  DFLASH_DEVICE void store_block_values(const Words4 (&values)[kValueLoads], const Words4& bias) const {
#pragma unroll
    for (int j = 0; j < kValueLoads; ++j) {
      const int i = tid_x() + j * kAllThreads;
      if (i >= kMaxBlock * kVectors) continue;
      const Shared row = block_values() + i / kVectors * kStride;
      const Words4 vector = p_.qkv_bias != nullptr ? add<T>(values[j], bias) : values[j];
      store_vector<kFp8 ? Columns::kEvenOdd : Columns::kPlain>(row, i % kVectors, vector);
    }
  }

  // Rounds the F16 queries to E4M3 for the keys of an FP8 cache. All rows are scaled by the power of two that makes the
  // largest element 128 to 256, below E4M3's limit of 448. E4M3 keeps its three bits down to 2^-6, 1/16,000 of the
  // largest element, so one factor is enough for all rows; one per row would take as many registers as the maxima.
  DFLASH_DEVICE void round_queries(float largest) const {
    // F16's smallest number is 2^-24. Infinite queries make the outputs NaN, as they would without rounding.
    const uint32_t exponent = max(as_bits(largest) >> 23, 127u - 24);
    const float factor = as_float((127 * 2 + 7 - exponent) << 23);
    if (tid_x() == 0) st_shared(Group::score_factor(), exponent == 255 ? 0x7fc00000u : (exponent - 7) << 23);
    using Rows = typename State::RoundedQueries;
#pragma unroll 1
    for (int i = tid_x(); i < N * D / 8; i += kAllThreads) {
      const int row = i / (D / 8), vector = i % (D / 8);
      const Shared from = query_at(row, vector);
      const Shared to = Group::rounded_queries() + Rows::swizzle(row * Rows::kRow + vector * 8);
      for (int j = 0; j < 2; ++j) {
        const uint32_t low = ld_shared(from + j * 8), high = ld_shared(from + j * 8 + 4);
        const float a = low_half_to_float(F16{}, low) * factor, b = high_half_to_float(F16{}, low) * factor;
        const float c = low_half_to_float(F16{}, high) * factor, d = high_half_to_float(F16{}, high) * factor;
        st_shared(to + j * 4, cvt_e4m3x4(a, b, c, d));
      }
    }
  }

  // Maximum over the CTA's threads.
  DFLASH_DEVICE float largest_of_threads(float largest) const {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) largest = fmaxf(largest, shfl_xor_sync(largest, mask));
    const Shared all = Group::slots() - kWarps * 4;  // memory that raise_maxima() uses later
    if (Group::lane() == 0) st_shared(all + tid_x() / 32 * 4, as_bits(largest));
    syncthreads();
    for (int warp = 0; warp < kWarps; ++warp) largest = fmaxf(largest, as_float(ld_shared(all + warp * 4)));
    return largest;
  }

  const Params& p_;
  const LaunchConfig& config_;
};

}  // namespace dflash::kv_injection
