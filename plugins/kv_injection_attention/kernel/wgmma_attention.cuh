// SPDX-License-Identifier: Apache-2.0
// The attention kernel of sm_90a. Grid: [kv heads, ranges].
//
// As in attention.cuh, a CTA holds the query rows of one kv head and processes one range of the context; the second
// kernel is the same. Teams are warpgroups, each of which has all of the rows (see wgmma_state.cuh).
#pragma once

#include <type_traits>

#include "kv_injection_attention/kernel/merge.cuh"
#include "kv_injection_attention/kernel/phases.cuh"
#include "kv_injection_attention/kernel/result.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"
#include "kv_injection_attention/kernel/wgmma_context_loader.cuh"
#include "kv_injection_attention/kernel/wgmma_rows.cuh"
#include "kv_injection_attention/kernel/wgmma_state.cuh"

namespace dflash::kv_injection {

// T is the block's format, N the launch's tile_rows. V of an FP8 cache is widened to F16 without loss. kAhead: a team's
// next scores are computed while the current step's values are multiplied, see attend_ahead().
template <int D, int N, class T, bool kFp8, bool kAhead = false>
class WgmmaAttention {
 public:
  DFLASH_DEVICE WgmmaAttention(const Params& p, const LaunchConfig& config) : p_(p), config_(config) {}

  // Work that does not depend on the preceding grid (programmatic dependent launch).
  DFLASH_DEVICE void prepare() const {
    static_assert(N <= Group::kAllThreads);
    if (tid_x() < N) st_shared(Group::slots() + tid_x() * 4, tid_x() / config_.group);
  }

  DFLASH_DEVICE void run() const {
    attend_range(p_, config_, Group::span(), [&] { attend_span(); });
  }

 private:
  static DFLASH_DEVICE ContextSpan span() { return Group::span().load(); }

  DFLASH_DEVICE void attend_span() const {
    stamp(Phase::kSpan);
    const ContextSpan now = span();
    // Steps of the context are dealt to the teams in turn. The block goes to the next team, or to the last one.
    const bool has_block = now.ends() && min(steps(now), kTeams - 1) == Group::team();
    const Rows rows(p_, config_);
    const typename Rows::First loaded = rows.load(now.request, now.ends());
    Context context(p_, config_, now, [] { return Group::span(); });
    stamp(Phase::kLoads);
    rows.store(loaded, now.request, now.ends());
    fence_proxy_async();
    syncthreads();
    stamp(Phase::kRows);

    attend_context(context, has_block);
    syncthreads();
    stamp(Phase::kResults);
    merge_and_write<ResultRow, Group::kAllThreads>(ResultWriter<D, T>(p_, config_, Group::span(), ctaid_x()), results(),
                                                   kThreads, num_results(), 0, config_.rows);
    stamp(Phase::kMerge);
  }

  static DFLASH_DEVICE int steps(const ContextSpan& span) {
    return ceil_div(span.key_end - span.key_begin, kWgmmaKeys);
  }
  // One result per team with steps, then the block's.
  static DFLASH_DEVICE int num_results() {
    const ContextSpan now = span();
    return min(steps(now), kTeams) + (now.ends() ? 1 : 0);
  }

  using Group = Warpgroup<D, N, kFp8, kAhead>;
  static constexpr int kTeams = Group::kTeams;
  static constexpr int kThreads = Group::kThreads;
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  using Context = WgmmaContextLoader<D, kElementBytes, kAhead>;
  using CacheOperands = LeftOperands<D, kFp8>;
  using BlockOperands = LeftOperands<D, false>;  // operands of the block's rows
  using State = WgmmaState<D, N, kFp8, kAhead>;
  using Score = std::conditional_t<kFp8, F16, T>;
  using Rows = WgmmaRows<D, N, T, kFp8, kAhead>;

  // Broadcast from one lane, so that the compiler knows the address is uniform.
  static DFLASH_DEVICE Shared uniform_team_weights(Shared place = 0) {
    return static_cast<Shared>(shfl_sync(static_cast<int>(Group::weights(Group::team()) + place), 0));
  }

  // A thread's addresses in every step, and the factor of its scores.
  struct StepAddresses {
    Shared keys, values;     // offsets to read at, from the step's rows
    Shared weights;          // address to write weights to
    float score_factor = 1;  // undoes the scale of rounded queries

    DFLASH_DEVICE StepAddresses() {
      const int warp = Group::warp(), lane = Group::lane();
      keys = CacheOperands::keys_at(warp, lane);
      values = Context::kValuesAt + CacheOperands::values_at(warp, lane);
      weights = State::weights_at(warp, lane);
      if (kFp8) score_factor = as_float(ld_shared(Group::score_factor()));
    }
  };

  // Masks the keys of a step outside [first(slot), end(slot)), where `slot` is the block slot of the thread's column.
  template <class First, class End>
  DFLASH_DEVICE void mask(float (&score)[N / 2], First first, End end) const {
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
      const int slot = static_cast<int>(ld_shared(Group::slots() + (c / 2 * 8 + c % 2 + Group::column()) * 4));
      const int from = first(slot), to = end(slot);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = Group::row() + half * 8;
        if (key < from || key >= to) score[State::at(c, half)] = as_float(0xff800000u);
      }
    }
  }

  // Computes a step's scores, relative to the maxima so far unless `kRaise`, when they will raise these. Context row j
  // is visible to slot s if j < length and length + s - j < window; `left` rows of the span remain from the step's
  // first on.
  template <bool kRaise>
  DFLASH_DEVICE void make_scores(const State& state, float (&score)[N / 2], const StepAddresses& addresses,
                                 bool all_visible, int left, Shared rows) const {
    uint32_t keys[D / (kFp8 ? 32 : 16)][4];
    CacheOperands::load_keys(keys, rows + addresses.keys);
    if constexpr (kFp8) {
      State::start_key_bytes(score, keys);
      State::template finish_key_bytes<0>(score);
      state.template scale_scores<kRaise>(score, addresses.score_factor);
    } else {
      if (!kRaise) state.load_negated_maxima(score);
      State::template multiply_keys<Score>(score, keys, 0, !kRaise);
    }
    if (!all_visible) mask_context(score, left);
  }
  DFLASH_DEVICE void mask_context(float (&score)[N / 2], int left) const {
    const ContextSpan now = span();
    // The window of slot s begins `s` rows later.
    const int window_begin = now.length - window_of(p_.sliding_window) + 1 - (now.key_end - left);
    mask(score, [&](int slot) { return window_begin + slot; }, [&](int) { return left; });
  }

  // Whether a step's scores stay in registers while maxima are raised. If not, because nvcc 13.0 would spill, they are
  // computed again.
  static constexpr bool kKeepsScores = !(kFp8 && D == 64 && N == 80);

  // In the `first` step no maxima are known yet, so they are raised at once.
  DFLASH_DEVICE void attend_keys(State& state, const StepAddresses& addresses, bool first, bool all_visible, int left,
                                 Shared rows) const {
    float sums[N / 4];
    for (bool raise = first;; raise = true) {
      float score[N / 2];
      if (raise) {
        make_scores<true>(state, score, addresses, all_visible, left, rows);
        state.raise_maxima(score, Group{});
      }
      if (!raise || !kKeepsScores) make_scores<false>(state, score, addresses, all_visible, left, rows);
      const bool exceeds = state.template softmax_weights<Score>(score, sums, addresses.weights);
      fence_proxy_async();
      // All weights are stored after the barrier, unless the maxima have to be raised first. This happens at most once,
      // because NaN exceeds any maximum.
      if (!barrier_red_or(Group::barrier(), kThreads, exceeds) || raise) break;
    }
#pragma unroll
    for (int c = 0; c < N / 4; ++c) state.sum[c] += sums[c];
    constexpr int kSteps = kWgmmaKeys / 16;
    uint32_t values[D / 64 * kSteps][4];
    CacheOperands::template load_values<kSteps>(values, rows + addresses.values);
    state.template start_values<Score, kSteps>(values, uniform_team_weights());
    state.finish_values();
  }

  // Whether a step with `left` remaining rows of the span is full and entirely visible to all slots.
  static DFLASH_DEVICE bool all_visible(int left) {
    return left >= kWgmmaKeys && left <= Group::span().rows_visible_to_all();
  }

  // attend_steps() for an FP8 cache. Products overlap with other work: the next step's key products with loading this
  // step's values, the value products with turning the next scores into weights. Weights are double-buffered, so that
  // one barrier per step is enough.
  DFLASH_DEVICE void attend_ahead(State& state, Context& context, bool& first) const {
    if (!context.find_next()) return;
    context.wait_for_next();
    const StepAddresses addresses;
    constexpr int kSteps = kWgmmaKeys / 16;
    float score[N / 2], sums[N / 4];
    Shared place = 0;  // offset of the step's weights from the first buffer
    for (bool exceeds = true;;) {
      fence_proxy_async();
      // The step's weights and values are complete after the barrier, and the previous step's stage and weights are
      // free.
      const bool raise = barrier_red_or(Group::barrier(), kThreads, exceeds);
      context.take_next([] { return Group::span(); });
      if (raise) {  // no weights yet, or too large ones: as in attend_keys()
        const int left = context.rows_left();
        make_scores<true>(state, score, addresses, all_visible(left), left, context.rows());
        state.raise_maxima(score, Group{});
        state.template softmax_weights<Score>(score, sums, addresses.weights + place);
        fence_proxy_async();
        Group::sync();
      }
      first = false;
#pragma unroll
      for (int c = 0; c < N / 4; ++c) state.sum[c] += sums[c];

      context.wait_for_next();
      syncwarp();  // a warp reads only keys that it copied itself; after the last step the products are not used
      uint32_t keys[D / 32][4], values[D / 64 * kSteps][4];
      CacheOperands::load_keys(keys, context.next_rows() + addresses.keys);
      State::start_key_bytes(score, keys);
      CacheOperands::template load_values<kSteps>(values, context.rows() + addresses.values);
      state.template start_values<Score, kSteps>(values, uniform_team_weights(place));
      State::template finish_key_bytes<1>(score);
      if (!context.find_next()) return state.finish_values();

      const int left = context.rows_left();
      state.template scale_scores<false>(score, addresses.score_factor);
      if (!all_visible(left)) mask_context(score, left);
      place = wgmma_weight_bytes(N) - place;
      exceeds = state.template softmax_weights<Score>(score, sums, addresses.weights + place);
      state.finish_values();
    }
  }

  // Block slot j is visible to slot s if |s - j| < window and, if causal, j <= s.
  DFLASH_DEVICE void attend_block(State& state) const {
    constexpr int kSteps = kMaxBlock / 16;
    const Rows rows(p_, config_);
    const int warp = Group::warp(), lane = Group::lane();
    const int window = min(window_of(p_.sliding_window), kMaxBlock);
    float score[N / 2] = {}, sums[N / 4];
    uint32_t keys[D / 16][4] = {};
    if (warp < kSteps) BlockOperands::load_keys(keys, rows.block_keys() + BlockOperands::keys_at(warp, lane));
    State::template multiply_keys<Score>(score, keys, 0, false);
    if constexpr (kFp8) {  // 16-bit keys have a k_scale of 1
      const float factor = config_.key_factor;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) score[i] *= factor;
    }
    mask(
        score, [&](int slot) { return slot - window + 1; },
        [&](int slot) { return min(p_.block, slot + (p_.causal ? 1 : window)); });
    state.raise_maxima(score, Group{});
    state.template softmax_weights<T>(score, sums, State::weights_at(warp, lane));
    fence_proxy_async();
    Group::sync();
#pragma unroll
    for (int c = 0; c < N / 4; ++c) state.sum[c] += sums[c];
    uint32_t values[D / 64 * kSteps][4];
    BlockOperands::template load_values<kSteps>(values, rows.block_values() + BlockOperands::values_at(warp, lane));
    state.template start_values<T, kSteps>(values, Group::weights(Group::team()));
    state.finish_values();
  }

  // Locates a query row in a team's results, which hold the maximum, sum and outputs of each of a thread's columns.
  struct ResultRow {
    static constexpr int kEach = D / 32 + 2;
    static constexpr int kValues = N / 4 * kEach;
    static constexpr int kSumThreads = 32, kMostTeams = kTeams + 1;
    int lane_of_quad, first_value;

    DFLASH_DEVICE explicit ResultRow(int row)
        : lane_of_quad(row % 8 / 2), first_value((row / 8 * 2 + row % 2) * kEach) {}
    DFLASH_DEVICE int maximum() const { return first_value; }
    DFLASH_DEVICE int sum_thread(int i) const { return i * 4 + lane_of_quad; }
    // A warp has 16 of every 64 columns of head_dim. With an FP8 cache, a thread has two adjacent ones.
    DFLASH_DEVICE int thread(int column) const {
      return column % 64 / 16 * 32 + (kFp8 ? column % 16 / 2 : column % 8) * 4 + lane_of_quad;
    }
    DFLASH_DEVICE int value(int column) const {
      return first_value + 2 + column / 64 * 2 + (kFp8 ? column % 2 : column / 8 % 2);
    }
  };
  static_assert(ResultRow::kValues == wgmma_values(D, N));

  // Results of each team with steps, then of the block; they reuse the stages' memory.
  DFLASH_DEVICE Shared results() const { return shared_memory() + config_.stages_at; }
  DFLASH_DEVICE void leave(const State& state, int team) const {
    TeamResults::Writer writer(TeamResults(results(), kThreads, ResultRow::kValues, team),
                               tid_x() % unsigned{kThreads});
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
      writer.store(-state.negated_maximum[c]);
      writer.store(state.sum[c]);
#pragma unroll
      for (int i = 0; i < D / 32; ++i) writer.store(state.output[i / 2][State::at(c, i % 2)]);
    }
  }

  // Attends to the team's steps of the context and to the block, if it is this team's.
  DFLASH_DEVICE void attend_context(Context& context, bool has_block) const {
    bool first = true;
    attend_steps(context, first, has_block);
    if (!has_block) return;
    // The block gets a result of its own instead of being added to the team's, because registers are scarce.
    State block;
    attend_block(block);
    stamp(Phase::kBlock);
    if (first) syncthreads();
    leave(block, first ? Group::team() : kTeams);
  }
  // `first` becomes false if there is a step. Teams with neither steps nor the block still take part in the barriers.
  DFLASH_DEVICE void attend_steps(Context& context, bool& first, bool has_block) const {
    State state;
    if constexpr (kAhead) {
      attend_ahead(state, context, first);
    } else {
      const StepAddresses addresses;
      while (context.next([] { return Group::span(); })) {
        const int left = context.rows_left();
        attend_keys(state, addresses, first, all_visible(left), left, context.rows());
        if (first) stamp(Phase::kFirstStep);
        first = false;
      }
    }
    stamp(Phase::kContext);
    if (kFp8) state.scale_outputs(p_.v_scale);
    if (has_block && first) return;
    syncthreads();  // all teams have finished with their stages
    if (!first) leave(state, Group::team());
  }

  const Params& p_;
  const LaunchConfig& config_;
};

template <int D, int N, class T, bool kFp8, bool kAhead = false>
__global__ void __launch_bounds__(32 * kWarpgroupWarps * wgmma_teams(D, kAhead), 1)
    wgmma_attention(const __grid_constant__ Params p, const __grid_constant__ LaunchConfig config) {
  stamp(Phase::kStart);
  griddepcontrol_launch_dependents();
  const WgmmaAttention<D, N, T, kFp8, kAhead> attention(p, config);
  attention.prepare();
  griddepcontrol_wait();  // see attention()
  stamp(Phase::kGridBefore);
  attention.run();
}

}  // namespace dflash::kv_injection
