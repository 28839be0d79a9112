// SPDX-License-Identifier: Apache-2.0
// The attention kernel of sm_90a. Grid: [kv heads, ranges].
//
// As in attention.cuh a CTA holds the query rows of one kv head and goes through one range of the context, and the
// second kernel is the same. Its teams are warpgroups, each of which has all of the rows: see wgmma_state.cuh.
#pragma once

#include <type_traits>

#include "kv_injection_attention/kernel/merge.cuh"
#include "kv_injection_attention/kernel/result.cuh"
#include "kv_injection_attention/kernel/rows.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"
#include "kv_injection_attention/kernel/stream.cuh"
#include "kv_injection_attention/kernel/wgmma_state.cuh"

namespace dflash::kv_injection {

// T is the block's format, N the plan's tile_rows. An FP8 cache is widened to F16, exactly.
template <int D, int N, class T, bool kBytes>
class WgmmaAttention {
 public:
  DFLASH_DEVICE WgmmaAttention(const Params& p, const Plan& plan) : p_(p), plan_(plan) {}

  // For `units` units, the first of which is unit `begin` of `request`.
  DFLASH_DEVICE void run(int request, int begin, int units) const {
    store_work(request, begin, units);
    while (run_segment()) continue;
  }

 private:
  // What is left of the CTA's range stands in shared memory: registers are short.
  DFLASH_DEVICE Segment segment() const { return {p_, work(0), work(1), work(2)}; }
  static DFLASH_DEVICE int work(int i) { return static_cast<int>(load_word(Group::work() + i * 4)); }
  static DFLASH_DEVICE void store_work(int request, int begin, int units) {
    if (thread_index() == 0) {
      store_word(Group::work(), request);
      store_word(Group::work() + 4, begin);
      store_word(Group::work() + 8, units);
    }
    cta_sync();
  }

  // False after the last.
  DFLASH_DEVICE bool run_segment() const {
    const Segment now = segment();
    const Worker worker(Group::team(), Group::warp());
    Context stream(p_, plan_, worker, now, grid_x());
    store_queries(now);
    if (now.ends) store_block(now);
    fence_for_wgmma();
    cta_sync();

    post_context(stream, now);
    cta_sync();
    if (Group::team() == 0) finish();
    const Segment done = segment();
    const int request = done.request + 1, left = work(2) - (done.end - done.begin);
    cta_sync();  // shared memory is free for the next segment
    store_work(request, 0, left);
    return left > 0;
  }

  static constexpr int kTeams = wgmma_teams(D);
  static constexpr int kThreads = Warpgroup<D, N>::kThreads;
  static constexpr int kElementBytes = kBytes ? 1 : 2;
  static constexpr int kStride = row_bytes(D, 2);
  static constexpr Columns kColumns = kBytes ? Columns::kPairs : Columns::kPlain;
  using Context = Stream<D, kElementBytes, kWgmmaKeys, wgmma_stages(D, kElementBytes), kTeams, kWarpgroupWarps>;
  using Group = Warpgroup<D, N>;
  using Cached = LeftOperands<D, kBytes>;
  using Own = LeftOperands<D, false>;  // of the block's rows
  using State = WgmmaState<D, N>;
  using Score = std::conditional_t<kBytes, F16, T>;
  static_assert(kTeams * (wgmma_weight_bytes(N) + wgmma_number_bytes(N)) >= N * kStride);

  // What a thread needs for every step.
  struct Places {
    Shared keys, values;     // where it reads, from the step's rows on
    Shared weights;          // where it writes weights
    Shared weights_pattern;  // taken from one lane: so the compiler knows that a warp's threads agree

    DFLASH_DEVICE Places() {
      const int warp = Group::warp(), lane = Group::lane();
      keys = Cached::keys_at(warp, lane);
      values = Context::kValuesAt + Cached::values_at(warp, lane);
      weights = State::weights_at(warp, lane);
      weights_pattern = static_cast<Shared>(from_lane(static_cast<int>(Group::weights(Group::team())), 0));
    }
  };

  DFLASH_DEVICE int head(int row) const { return grid_x() * plan_.group + row % plan_.group; }

  DFLASH_DEVICE const float* rope(const Segment& s) const { return p_.rope + int64_t{s.request} * p_.block * D; }

  // First as rows beside each other where the weights will be, then as the patterns that wgmma reads.
  DFLASH_DEVICE void store_queries(const Segment& s) const {
    const auto locate = [&](int i, int64_t& at, int& slot) {
      slot = i / plan_.group;
      at = qkv_row(p_, s.request, slot, head(i));
      return i < plan_.rows;
    };
    const Shared patterns = aligned_shared_memory(), rows = patterns + wgmma_query_bytes(D, N);
    const float eps = s.slot < 0 ? as_float(0x7fc00000u) : p_.rms_norm_eps;  // NaN queries make NaN outputs
    // Products with the context's keys are scores in units of log2.
    const float factor = p_.softmax_scale * p_.k_scale * kLog2E;
    store_rotated_rows<D, T, Score, kColumns>({p_.qkv, p_.q_norm, factor}, rope(s), eps, N, rows, locate);
    for (int i = thread_index(); i < N; i += kTeams * kThreads) store_word(Group::slots() + i * 4, i / plan_.group);
    cta_sync();
#pragma unroll 1
    for (int i = thread_index(); i < N * D / 8; i += kTeams * kThreads) {
      const int row = i / (D / 8), vector = i % (D / 8);
      const Shared from = rows + row * kStride + vector * 16;
      const Shared to = patterns + vector / 8 * (N * kPatternRowBytes) +
                        swizzled(row * kPatternRowBytes + vector % 8 * 16);
      for (int j = 0; j < 16; j += 4) store_word(to + j, load_word(from + j));
    }
  }

  DFLASH_DEVICE void store_block(const Segment& s) const {
    const auto locate = [&](int i, int64_t& at, int& slot) {
      slot = i;
      at = qkv_row(p_, s.request, slot, p_.num_heads + grid_x());
      return i < p_.block;
    };
    store_rotated_rows<D, T, Score, kColumns>({p_.qkv, p_.k_norm, 1}, rope(s), p_.rms_norm_eps, kMaxBlock,
                                              block_keys(), locate);
    constexpr int kVectors = D / 8;
#pragma unroll 1
    for (int i = thread_index(); i < kMaxBlock * kVectors; i += kTeams * kThreads) {
      int64_t at;
      int slot;
      const bool real = locate(i / kVectors, at, slot);
      const auto* rows = static_cast<const unsigned char*>(p_.qkv);
      // Behind all keys: as many rows of D further on as there are of them.
      const Words vector = real ? load_words(rows + (at + p_.num_kv_heads) * D * 2 + i % kVectors * 16) : Words{};
      store_vector<kBytes ? Columns::kEvenOdd : Columns::kPlain>(block_values() + i / kVectors * kStride,
                                                                 i % kVectors, vector);
    }
  }

  DFLASH_DEVICE Shared block_keys() const { return aligned_shared_memory() + plan_.block_at; }
  DFLASH_DEVICE Shared block_values() const { return block_keys() + kMaxBlock * kStride; }

  // Hides what lies outside [first(slot), end(slot)) of the keys of a step, `slot` being that of the thread's column.
  template <class First, class End>
  DFLASH_DEVICE void mask(float (&score)[N / 2], First first, End end) const {
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
      const int slot = static_cast<int>(load_word(Group::slots() + (c / 2 * 8 + c % 2 + Group::column()) * 4));
      const int from = first(slot), to = end(slot);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int key = Group::row() + half * 8;
        if (key < from || key >= to) score[State::at(c, half)] = as_float(0xff800000u);
      }
    }
  }

  // Context row j is visible to slot s if j < length and length + s - j < window.
  // `first` is the step's first, and `seen` says that all of them are.
  DFLASH_DEVICE void attend_keys(State& state, const Places& places, bool seen, int first, Shared rows) const {
    float sums[N / 4];
    for (bool raise = false;; raise = true) {
      float score[N / 2];
      uint32_t left[D / 16][4];
      Cached::load_keys(left, rows + places.keys);
      state.start_scores(score);
      State::template multiply_keys<Score>(score, left, 0, !raise);
      if (!seen) {
        const Segment now = segment();
        // The window of slot s begins `s` rows behind this one.
        const int window_begin = now.length - window_of(p_.sliding_window) + 1 - first;
        const int end = now.key_end - first;
        mask(score, [&](int slot) { return window_begin + slot; }, [&](int) { return end; });
      }
      if (raise) state.raise_maxima(score, Group{});
      const bool exceeds = state.template weigh<Score>(score, sums, places.weights);
      fence_for_wgmma();
      // Now all weights are there, unless the maxima have to move first: then the scores are computed again.
      if (!any_of_group(Group::barrier(), kThreads, exceeds)) break;
    }
#pragma unroll
    for (int c = 0; c < N / 4; ++c) state.sum[c] += sums[c];
    constexpr int kSteps = kWgmmaKeys / 16;
    uint32_t left[D / 64 * kSteps][4];
    Cached::template load_values<kSteps>(left, rows + places.values);
    state.template add_values<Score, kSteps>(left, places.weights_pattern);
  }

  // Block slot j is visible to slot s if |s - j| < window, and if causal j <= s.
  DFLASH_DEVICE void read_block(State& state) const {
    constexpr int kSteps = kMaxBlock / 16;
    const int warp = Group::warp(), lane = Group::lane();
    const int window = min(window_of(p_.sliding_window), kMaxBlock);
    const float factor = 1 / p_.k_scale;  // the block's keys have no scale
    float score[N / 2] = {}, sums[N / 4];
#pragma unroll 1
    for (int i = 0; i < D / 16; ++i) {  // one after another: registers are shorter than time
      uint32_t keys[1][4] = {};
      if (warp < kSteps) Own::load_keys(keys, block_keys() + Own::keys_at(warp, lane) + i * 32);
      State::template multiply_keys<Score>(score, keys, i, i > 0);
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) score[i] *= factor;
    mask(score, [&](int slot) { return slot - window + 1; },
         [&](int slot) { return min(p_.block, slot + (p_.causal ? 1 : window)); });
    state.raise_maxima(score, Group{});
    state.template weigh<T>(score, sums, State::weights_at(warp, lane));
    fence_for_wgmma();
    Group::sync();
#pragma unroll
    for (int c = 0; c < N / 4; ++c) state.sum[c] += sums[c];
    uint32_t values[D / 64 * kSteps][4];
    Own::template load_values<kSteps>(values, block_values() + Own::values_at(warp, lane));
    state.template add_values<T, kSteps>(values, Group::weights(Group::team()));
  }

  // A thread of one team and its like in another have the same rows and columns, so a team's attention to the context
  // is left from thread to thread, where the stages were.
  DFLASH_DEVICE Mailbox mailbox(int team) const {
    constexpr int kValues = N / 2 + D / 64 * (N / 2);
    static_assert(kValues * kThreads * 4 <= wgmma_stages(D, kElementBytes) * wgmma_stage_bytes(D, kElementBytes));
    return {plan_, Worker(Group::team(), Group::warp()), team + 1, kValues};
  }

  DFLASH_DEVICE void post_context(Context& stream, const Segment& segment) const {
    State state;
    // The first row from which on all block slots see a row.
    const int seen_begin = segment.length - window_of(p_.sliding_window) + p_.block;
    const int end = segment.key_end;
    const Places places;
    while (stream.next()) {
      const bool seen = stream.key() >= seen_begin && stream.key() + kWgmmaKeys <= end;
      attend_keys(state, places, seen, stream.key(), stream.rows());
    }
    if (kBytes) state.scale_outputs(p_.v_scale);
    cta_sync();  // every team is done with its stages
    Mailbox box = mailbox(Group::team());
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
      box.put(state.start[c]);
      box.put(state.sum[c]);
#pragma unroll
      for (int i = 0; i < D / 32; ++i) box.put(state.output[i / 2][State::at(c, i % 2)]);
    }
  }

  // The block, and what all teams have of the context: by one team.
  DFLASH_DEVICE void finish() const {
    State state;
    if (segment().ends) read_block(state);
#pragma unroll 1
    for (int team = 0; team < kTeams; ++team) {
      Mailbox box = mailbox(team);
#pragma unroll
      for (int c = 0; c < N / 4; ++c) {
        const float start = box.take();
        state.raise_maximum(c, -start);
        const float by = exp2_fast(state.start[c] - start);
        state.sum[c] += by * box.take();
#pragma unroll
        for (int i = 0; i < D / 32; ++i) state.output[i / 2][State::at(c, i % 2)] += by * box.take();
      }
    }
    state.finish_sums(Group{});
    write(state);
  }

  // Column of head_dim that a thread's element of the outputs is.
  DFLASH_DEVICE int output_column(int tile, int half) const {
    const int first = tile * 64 + Group::warp() * 16;
    return first + (kBytes ? Group::lane() / 4 * 2 + half : Group::lane() / 4 + half * 8);
  }

  DFLASH_DEVICE void write(const State& state) const {
    const Segment segment = this->segment();
    const bool whole = segment.begin == 0 && segment.ends;
    const int64_t first = Partials<D>::row(p_, plan_, grid_y(), grid_x(), segment.begin == 0);
#pragma unroll
    for (int c = 0; c < N / 4; ++c) {
      const int row = c / 2 * 8 + c % 2 + Group::column();
      const Softmax softmax{-state.start[c], state.sum[c]};
      if (row >= plan_.rows) continue;
      if (whole) {
        write_output(state, c, softmax, segment.request, row);
      } else {
        write_partial(state, c, softmax, first + row);
      }
    }
  }

  DFLASH_DEVICE void write_output(const State& state, int c, const Softmax& softmax, int request, int row) const {
    const int64_t at = (int64_t{request} * p_.block + row / plan_.group) * p_.num_heads + head(row);
    const float factor = softmax.factor(p_.sinks, head(row));
    auto* out = static_cast<uint16_t*>(p_.out) + at * D;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const float value = state.output[i / 2][State::at(c, i % 2)] * factor;
      out[output_column(i / 2, i % 2)] = static_cast<uint16_t>(pack(T{}, value, 0));
    }
  }

  DFLASH_DEVICE void write_partial(const State& state, int c, const Softmax& softmax, int64_t at) const {
    const Partials<D> partials(p_, plan_);
    if (Group::row() == 0) partials.softmax[at] = softmax;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      partials.outputs[at * D + output_column(i / 2, i % 2)] = state.output[i / 2][State::at(c, i % 2)];
    }
  }

  const Params& p_;
  const Plan& plan_;
};

template <int D, int N, class T, bool kBytes>
__global__ void __launch_bounds__(32 * kWarpgroupWarps* wgmma_teams(D), 1)
    wgmma_attention(const __grid_constant__ Params p, const __grid_constant__ Plan plan) {
  release_next_grid();
  wait_for_previous_grid();  // as attention() does
  const Schedule schedule(p, plan);
  if (grid_y() >= schedule.ranges()) return;
  const int first = schedule.begin(grid_y());
  const int units = schedule.begin(grid_y() + 1) - first;
  const Place place = schedule.find(first);
  WgmmaAttention<D, N, T, kBytes>(p, plan).run(place.request, first - place.first_unit, units);
}

}  // namespace dflash::kv_injection
