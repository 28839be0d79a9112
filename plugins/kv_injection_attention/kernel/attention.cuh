// SPDX-License-Identifier: Apache-2.0
// The attention kernel. Grid: [kv heads * row tiles, ranges].
//
// A CTA holds the query rows of one kv head (S slots times N/G heads, so that a cache row is read once for all of them)
// and processes one range of the context, request by request. Its warps form teams. Each team processes its own steps
// of the context at its own pace; each warp of a team has its own rows.
//
// short_attention() is a variant for short contexts. A CTA processes the whole context of a request, so nothing is
// scheduled or combined, and a warp has 16 rows. Its code is smaller, which matters because short calls mostly wait for
// instruction fetches.
#pragma once

#include <type_traits>

#include "kv_injection_attention/kernel/context_loader.cuh"
#include "kv_injection_attention/kernel/merge.cuh"
#include "kv_injection_attention/kernel/result.cuh"
#include "kv_injection_attention/kernel/rows.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"
#include "kv_injection_attention/kernel/state.cuh"

namespace dflash::kv_injection {

// T is the block's format. An FP8 cache is widened to F16 without loss, so its products are computed in F16; the
// block's own values stay in T, because they may need its range. kShort: a span is the whole context of a request.
template <int D, class T, bool kFp8, bool kShort = false>
class Attention {
 public:
  static DFLASH_DEVICE void run(const Params& p, const LaunchConfig& config) {
    // Constructed anew for each span, so that few registers stay live from one span to the next.
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

  // The span is stored in the padding of the first two query rows.
  static DFLASH_DEVICE StoredSpan span() {
    static_assert(kStride == D * 2 + 16);
    return {shared_memory() + D * 2, shared_memory() + D * 2 + kStride};
  }
  static DFLASH_DEVICE bool has_block() { return kShort || span().load().ends(); }
  DFLASH_DEVICE int kv_head() const { return ctaid_x() / config_.row_tiles; }
  // The CTA's first row, counted over all row tiles, and the warp's first row within the CTA.
  DFLASH_DEVICE int first_row() const { return ctaid_x() % config_.row_tiles * config_.tile_rows; }
  DFLASH_DEVICE int warp_row() const { return worker_.row_group * 16 * kMostTiles; }

  // The thread's row of the (request, kv head), counted over all row tiles.
  DFLASH_DEVICE int row(int t, int half) const {
    return first_row() + warp_row() + t * 16 + half * 8 + worker_.lane() / 4;
  }

  DFLASH_DEVICE int slot(int t, int half) const { return row(t, half) / config_.group; }
  DFLASH_DEVICE Shared block_keys() const { return shared_memory() + config_.block_at; }
  DFLASH_DEVICE Shared block_values() const { return block_keys() + config_.block_rows * kStride; }

  // Attends to the context of the span and, if the span ends with it, to the block.
  DFLASH_DEVICE void attend_span() const {
    const StoredSpan stored = span();
    const ContextSpan now = stored.load();
    // Folded into the queries, so that their products with context keys are scores in log2 units. 16-bit keys have a
    // k_scale of 1.
    const float factor = kFp8 ? p_.softmax_scale * p_.k_scale : p_.softmax_scale;
    const BlockRows<D, T, Score, kFp8> rows{
        p_,     config_, now.request, kv_head(), first_row(), config_.tile_rows, has_block() ? config_.block_rows : 0,
        factor, kLog2E};
    const auto first = rows.load();
    Context context(p_, config_, worker_, stored);
    rows.store(first, shared_memory(), block_keys(), block_values());
    syncthreads();

    // All warps must take the same branch, because it contains barriers.
    kMostTiles > 1 && config_.tile_rows > 16 ? attend<kMostTiles>(context) : attend<1>(context);
  }

  // Attends with the warp's `kTiles` tiles of rows.
  template <int kTiles>
  DFLASH_DEVICE void attend(Context& context) const {
    State<D, kTiles> state;
    const Queries<D, kTiles> queries(shared_memory() + warp_row() * kStride, worker_.lane());
    // True in the last warp of gpt-oss's 80 rows. Other head_dims lack the registers for both variants.
    const bool one_tile = kTiles > 1 && D == 64 && first_row() + warp_row() + 16 >= config_.rows;
    bool first = true;
    while (context.next()) {
#pragma unroll 1
      for (int j = 0; j < kStep; j += kMmaKeys) {
        const Shared keys = context.rows() + j * Context::kStride, values = keys + Context::kValuesAt;
        one_tile ? attend_keys<1>(state, queries, first, context.rows_left() - j, keys, values)
                 : attend_keys<kTiles>(state, queries, first, context.rows_left() - j, keys, values);
        first = false;
      }
    }
    if (kFp8) state.scale_outputs(p_.v_scale);
    if (has_block()) attend_block(state, context.turns_ahead());
    merge(state);
  }

  // Context row j is visible to slot s if j < length and length + s - j < window; `left` rows of the span remain from
  // the first of these keys on. Computes the first `kTiles` tiles of rows. In the `first` step no maxima are known yet,
  // so they are raised at once.
  template <int kTiles, int kHeld>
  DFLASH_DEVICE void attend_keys(State<D, kHeld>& state, const Queries<D, kHeld>& queries, bool first, int left,
                                 Shared keys, Shared values) const {
    Block<D, kTiles, kHeld, Score, Score, kFp8> block(worker_.lane());
    const int visible_to_all = span().rows_visible_to_all();  // loaded on every use to save a register
#pragma unroll(kShort ? 1 : 2)
    for (int turn = kShort && first ? 1 : 0; turn < 2; ++turn) {
      const bool raise = turn > 0;
      block.multiply_keys(queries, keys, state, !raise);
      if (left < kMmaKeys || left > visible_to_all) {
        // Slot 0's window begins `block` - 1 rows before the last slot's, and `s` rows before slot s's.
        const int window_begin = left - visible_to_all - p_.block + 1;
        block.mask([&](int t, int half) { return window_begin + slot(t, half); }, [&](int, int) { return left; });
      }
      if (raise) block.rescale_and_softmax_weights(state, 1);
      if (raise || block.try_softmax_weights(state)) break;
    }
    block.add_values(state, values);
  }

  // After the context's steps, 16-slot steps of the block are dealt to the teams: this team takes step `turn`, then
  // every `teams`th. Slot j is visible to slot s if |s - j| < window, and if causal j <= s.
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
      block.rescale_and_softmax_weights(state, 1 / p_.k_scale);  // undoes k_scale, which the block's keys do not have
      block.add_values(state, block_values() + begin * kStride);
    }
  }

  // Locates a CTA row in a team's results. For each tile of its warp they hold the row's maximum, sum and columns; each
  // thread has two of every eight columns.
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
    // After widening an FP8 cache, one matrix holds the even columns of every 16 and the next the odd ones.
    DFLASH_DEVICE int thread(int column) const { return first_thread + (kFp8 ? column % 16 / 4 : column % 8 / 2); }
    DFLASH_DEVICE int value(int column) const {
      const int matrix = kFp8 ? column / 16 * 2 + column % 2 : column / 8, element = kFp8 ? column % 4 / 2 : column % 2;
      return first_value + 2 + matrix * 2 + element;
    }
  };

  // Number of teams that had work: steps of the context, then 16-slot steps of the block.
  DFLASH_DEVICE int num_results() const {
    const ContextSpan now = span().load();
    const int block = has_block() ? ceil_div(p_.block, kMmaKeys) : 0;
    return min(config_.teams, ceil_div(now.key_end - now.key_begin, kStep) + block);
  }
  // The results begin after the stored span.
  static DFLASH_DEVICE Shared results() { return shared_memory() + results_at(D); }

  template <int kTiles>
  DFLASH_DEVICE void merge(const State<D, kTiles>& state) const {
    using Rows = ResultRow<kTiles>;
    const int threads = team_threads(config_);
    syncthreads();  // all teams have finished with their stages
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
    merge_and_write<Rows>(ResultWriter<D, T, kShort>(p_, config_, span(), kv_head()), results(), threads,
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
  griddepcontrol_wait();  // the preceding grid may write every input
  Attention<D, T, kFp8>::run(p, config);
}

// Grid: [kv heads * row tiles, requests].
template <int D, class T, bool kFp8>
__global__ void __launch_bounds__(32 * short_warps(D), 1)
    short_attention(const __grid_constant__ Params p, const __grid_constant__ LaunchConfig config) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();  // see attention()
  Attention<D, T, kFp8, true>::run(p, config);
}

}  // namespace dflash::kv_injection
