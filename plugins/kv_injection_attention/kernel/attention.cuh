// SPDX-License-Identifier: Apache-2.0
// The attention kernel. Grid: [kv heads * row tiles, ranges].
//
// A CTA holds the query rows of one kv head (S slots times N/G heads, so that a cache row is read once for all of
// them) and goes through one range of the context, request by request. Its warps form teams; a team goes through its
// own steps of the context at its own pace, each of its warps with its own rows.
//
// short_attention() is the same for short contexts: a CTA has all of a request's, so there is nothing to schedule and
// nothing to combine, and a warp has 16 rows. A short call waits for its code, and this is less.
#pragma once

#include <type_traits>

#include "kv_injection_attention/kernel/context_loader.cuh"
#include "kv_injection_attention/kernel/merge.cuh"
#include "kv_injection_attention/kernel/result.cuh"
#include "kv_injection_attention/kernel/rows.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"
#include "kv_injection_attention/kernel/state.cuh"

namespace dflash::kv_injection {

// T is the block's format. An FP8 cache is widened to F16, exactly, so its products are F16 products; the block's own
// values stay in T, whose range they may use. kShort: a span is all of a request's context.
template <int D, class T, bool kFp8, bool kShort = false>
class Attention {
 public:
  static DFLASH_DEVICE void run(const Params& p, const LaunchConfig& config) {
    // Of each span anew, so that little of what a thread computes is kept in registers from one to the next.
    const auto attend = [&] { Attention(p, config).attend_span(); };
    if (!kShort) return attend_range(p, config, span(), attend);
    if (tid_x() < 32) span().store(p, {ctaid_y(), 0, kMaxContext});
    syncthreads();
    attend();
  }

 private:
  DFLASH_DEVICE Attention(const Params& p, const LaunchConfig& config) : p_(p), config_(config), worker_(config) {}

  static constexpr int kMostTiles = kShort ? 1 : warp_tiles(D);
  static constexpr int kStep = step_keys(D, kFp8 ? 1 : 2);
  static constexpr int kStride = row_bytes(D, 2);
  static_assert(kMostTiles <= 2);
  using Score = std::conditional_t<kFp8, F16, T>;
  using Context = ContextLoader<D, kFp8 ? 1 : 2>;

  // In the padding of the first two query rows.
  static DFLASH_DEVICE StoredSpan span() {
    static_assert(kStride == D * 2 + 16);
    return {shared_memory() + D * 2, shared_memory() + D * 2 + kStride};
  }
  static DFLASH_DEVICE bool has_block() { return kShort || span().load().ends(); }
  DFLASH_DEVICE int kv_head() const { return ctaid_x() / config_.row_tiles; }
  // The first row of the CTA, counted over all row tiles; of the warp, counted in the CTA.
  DFLASH_DEVICE int first_row() const { return ctaid_x() % config_.row_tiles * config_.tile_rows; }
  DFLASH_DEVICE int warp_row() const { return worker_.row_group * 16 * kMostTiles; }

  // Row of the (request, kv head) that a thread's row is, counted over all row tiles.
  DFLASH_DEVICE int row(int t, int half) const {
    return first_row() + warp_row() + t * 16 + half * 8 + worker_.lane() / 4;
  }

  DFLASH_DEVICE int slot(int t, int half) const { return row(t, half) / config_.group; }
  DFLASH_DEVICE Shared block_keys() const { return shared_memory() + config_.block_at; }
  DFLASH_DEVICE Shared block_values() const { return block_keys() + config_.block_rows * kStride; }

  // The context and the block.
  DFLASH_DEVICE void attend_span() const {
    const StoredSpan stored = span();
    const ContextSpan now = stored.load();
    // Products with the context's keys are scores in units of log2. The k_scale of 16-bit keys is 1.
    const float factor = kFp8 ? p_.softmax_scale * p_.k_scale : p_.softmax_scale;
    const BlockRows<D, T, Score, kFp8> rows{
        p_,     config_, now.request, kv_head(), first_row(), config_.tile_rows, has_block() ? config_.block_rows : 0,
        factor, kLog2E};
    const auto first = rows.load();
    Context context(p_, config_, worker_, stored);
    rows.store(first, now.slot >= 0, shared_memory(), block_keys(), block_values());
    syncthreads();

    // All warps take the same of the two, for they meet in its barriers.
    kMostTiles > 1 && config_.tile_rows > 16 ? attend<kMostTiles>(context) : attend<1>(context);
  }

  // With the warp's `kTiles` tiles of rows.
  template <int kTiles>
  DFLASH_DEVICE void attend(Context& context) const {
    State<D, kTiles> state;
    const Queries<D, kTiles> queries(shared_memory() + warp_row() * kStride, worker_.lane());
    // True in the last warp of gpt-oss's 80 rows. With other head_dims, registers do not suffice for both ways.
    const bool one_tile = kTiles > 1 && D == 64 && first_row() + warp_row() + 16 >= config_.rows;
    const int visible_to_all = span().rows_visible_to_all();
    bool first = true;
    while (context.next()) {
#pragma unroll 1
      for (int j = 0; j < kStep; j += kMmaKeys) {
        const Shared keys = context.rows() + j * Context::kStride, values = keys + Context::kValuesAt;
        one_tile ? attend_keys<1>(state, queries, first, visible_to_all, context.rows_left() - j, keys, values)
                 : attend_keys<kTiles>(state, queries, first, visible_to_all, context.rows_left() - j, keys, values);
        first = false;
      }
    }
    if (kFp8) state.scale_outputs(p_.v_scale);
    if (has_block()) attend_block(state, context.turns_ahead());
    merge(state);
  }

  // Context row j is visible to slot s if j < length and length + s - j < window; `left` rows of the span remain from
  // the first of these keys on. For the first `kTiles` tiles of rows, of whose maxima nothing is known by a `first`
  // step: they are raised at once.
  template <int kTiles, int kHeld>
  DFLASH_DEVICE void attend_keys(State<D, kHeld>& state, const Queries<D, kHeld>& queries, bool first,
                                 int visible_to_all, int left, Shared keys, Shared values) const {
    Block<D, kTiles, kHeld, Score, Score, kFp8> block(worker_.lane());
#pragma unroll(kShort ? 1 : 2)
    for (int turn = kShort && first ? 1 : 0; turn < 2; ++turn) {
      const bool raise = turn > 0;
      block.multiply_keys(queries, keys, state, !raise);
      if (left < kMmaKeys || left > visible_to_all) {
        // Slot 0's window begins `block` - 1 rows before that of the last slot, `s` rows before that of slot s.
        const int window_begin = left - visible_to_all - p_.block + 1;
        block.mask([&](int t, int half) { return window_begin + slot(t, half); }, [&](int, int) { return left; });
      }
      if (raise) block.rescale_and_softmax_weights(state, 1);
      if (raise || block.try_softmax_weights(state)) break;
    }
    block.add_values(state, values);
  }

  // The block is dealt to the teams behind the context: this one's first `turn` of 16 slots, and every `teams`th. Slot
  // j is visible to slot s if |s - j| < window, and if causal j <= s.
  template <int kTiles>
  DFLASH_DEVICE void attend_block(State<D, kTiles>& state, int turn) const {
    const int window = min(window_of(p_.sliding_window), kMaxBlock);
#pragma unroll 1
    for (int begin = turn * kMmaKeys; begin < p_.block; begin += config_.teams * kMmaKeys) {
      Block<D, kTiles, kTiles, Score, T, false> block(worker_.lane());
      const Queries<D, kTiles> queries(shared_memory() + warp_row() * kStride, worker_.lane());
      block.multiply_keys(queries, block_keys() + begin * kStride, state, false);
      block.mask([&](int t, int half) { return slot(t, half) - window + 1 - begin; },
                 [&](int t, int half) {
                   const int ahead = p_.causal ? 1 : window;
                   return min(p_.block, slot(t, half) + ahead) - begin;
                 });
      block.rescale_and_softmax_weights(state, 1 / p_.k_scale);  // the block's keys have no scale
      block.add_values(state, block_values() + begin * kStride);
    }
  }

  // Where a row of the CTA stands in the results of a team: of each tile of its warp the row's maximum, sum and
  // columns, each thread with two of every eight columns.
  template <int kTiles>
  struct ResultRow {
    static constexpr int kEach = D / 4 + 2;
    static constexpr int kValues = kTiles * 2 * kEach;
    static constexpr int kSumThreads = 4, kMostTeams = kMaxTeams;
    int first_thread, first_value;

    DFLASH_DEVICE explicit ResultRow(int row)
        : first_thread(row / (16 * kTiles) * 32 + row % 8 * 4), first_value(row / 8 % (2 * kTiles) * kEach) {}
    DFLASH_DEVICE int maximum() const { return first_value; }
    DFLASH_DEVICE int sum_thread(int i) const { return first_thread + i; }
    // Of the widened columns of an FP8 cache, a matrix has the even ones of sixteen, the next the odd ones.
    DFLASH_DEVICE int thread(int column) const { return first_thread + (kFp8 ? column % 16 / 4 : column % 8 / 2); }
    DFLASH_DEVICE int value(int column) const {
      const int matrix = kFp8 ? column / 16 * 2 + column % 2 : column / 8, element = kFp8 ? column % 4 / 2 : column % 2;
      return first_value + 2 + matrix * 2 + element;
    }
  };

  // Teams that have had something to do: of steps of the context, and behind them of 16 slots of the block.
  DFLASH_DEVICE int num_results() const {
    const ContextSpan now = span().load();
    const int block = has_block() ? ceil_div(p_.block, kMmaKeys) : 0;
    return min(config_.teams, ceil_div(now.key_end - now.key_begin, kStep) + block);
  }
  // Behind the span.
  static DFLASH_DEVICE Shared results() { return shared_memory() + results_at(D); }

  template <int kTiles>
  DFLASH_DEVICE void merge(const State<D, kTiles>& state) const {
    using Rows = ResultRow<kTiles>;
    const int threads = team_threads(config_);
    syncthreads();  // every team is done with its stages
    TeamResults::Writer writer(TeamResults(results(), threads, Rows::kValues, worker_.team), worker_.team_thread());
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        writer.store(state.maximum(t, half));
        writer.store(state.sum[t][half]);
#pragma unroll
        for (int n = 0; n < D / 4; ++n) writer.store(state.output[t][n / 2][2 * half + n % 2]);
      }
    }
    syncthreads();
    merge_and_write<Rows>(ResultWriter<D, T, kShort>(p_, config_, span().load(), kv_head()), results(), threads,
                          num_results(), first_row(), min(config_.tile_rows, config_.rows - first_row()));
  }

  const Params& p_;
  const LaunchConfig& config_;
  const Worker worker_;
};

template <int D, class T, bool kFp8>
__global__ void __launch_bounds__(32 * max_warps(D), 2)
    attention(const __grid_constant__ Params p, const __grid_constant__ LaunchConfig config) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();  // all that is read may be its: the block, slots and lengths, rows just appended
  Attention<D, T, kFp8>::run(p, config);
}

// Grid: [kv heads * row tiles, requests].
template <int D, class T, bool kFp8>
__global__ void __launch_bounds__(32 * short_warps(D), 1)
    short_attention(const __grid_constant__ Params p, const __grid_constant__ LaunchConfig config) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();  // as attention() does
  Attention<D, T, kFp8, true>::run(p, config);
}

}  // namespace dflash::kv_injection
