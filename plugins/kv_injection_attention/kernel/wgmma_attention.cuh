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
#include "kv_injection_attention/kernel/wgmma_state.cuh"
#include "kv_injection_attention/kernel/wgmma_stream.cuh"

namespace dflash::kv_injection {

// T is the block's format, N the plan's tile_rows. Of an FP8 cache, V is widened to F16, exactly.
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
    Context stream(p_, plan_, Group::team(), thread_index() % unsigned{kThreads}, now, grid_x());
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
  static constexpr int kThreads = Warpgroup<D, N, kBytes>::kThreads;
  static constexpr int kElementBytes = kBytes ? 1 : 2;
  static constexpr int kStride = row_bytes(D, 2);
  static constexpr int kWarps = kTeams * kWarpgroupWarps;
  using Context = WgmmaStream<D, kElementBytes>;
  using Group = Warpgroup<D, N, kBytes>;
  using Cached = LeftOperands<D, kBytes>;
  using Own = LeftOperands<D, false>;  // of the block's rows
  using State = WgmmaState<D, N, kBytes>;
  using Score = std::conditional_t<kBytes, F16, T>;
  static_assert(kTeams * (wgmma_weight_bytes(N) + wgmma_number_bytes(N)) >= N * kStride + kWarps * 4);

  // What a thread needs for every step.
  struct Places {
    Shared keys, values;     // where it reads, from the step's rows on
    Shared weights;          // where it writes weights
    Shared weights_pattern;  // taken from one lane: so the compiler knows that a warp's threads agree
    float score_factor = 1;  // of rounded queries


    DFLASH_DEVICE Places() {
      const int warp = Group::warp(), lane = Group::lane();
      keys = Cached::keys_at(warp, lane);
      values = Context::kValuesAt + Cached::values_at(warp, lane);
      weights = State::weights_at(warp, lane);
      weights_pattern = static_cast<Shared>(from_lane(static_cast<int>(Group::weights(Group::team())), 0));
      if (kBytes) score_factor = as_float(load_word(Group::score_factor()));
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
    const Shared patterns = Group::queries(), rows = Group::weights(0);
    const float eps = s.slot < 0 ? as_float(0x7fc00000u) : p_.rms_norm_eps;  // NaN queries make NaN outputs
    // Products with the context's keys are scores in units of log2.
    const float factor = p_.softmax_scale * p_.k_scale * kLog2E;
    store_rotated_rows<D, T, Score, Columns::kPlain>({p_.qkv, p_.q_norm, factor}, rope(s), eps, N, rows, locate);
    for (int i = thread_index(); i < N; i += kTeams * kThreads) store_word(Group::slots() + i * 4, i / plan_.group);
    cta_sync();
    float most = 0;  // of the absolute values; takes no notice of NaN
#pragma unroll 1
    for (int i = thread_index(); i < N * D / 8; i += kTeams * kThreads) {
      const int row = i / (D / 8), vector = i % (D / 8);
      const Shared from = rows + row * kStride + vector * 16;
      const Shared to = patterns + vector / 8 * (N * State::Queries::kRow) +
                        State::Queries::swizzled(row * State::Queries::kRow + vector % 8 * 16);
      for (int j = 0; j < 16; j += 4) {
        const uint32_t pair = load_word(from + j);
        store_word(to + j, pair);
        if (kBytes) most = fmaxf(most, fmaxf(fabsf(first_of(F16{}, pair)), fabsf(second_of(F16{}, pair))));
      }
    }
    if constexpr (kBytes) round_queries(rows, largest_of_threads(most));
  }

  // What meets the keys of an FP8 cache: all rows of F16, times the power of two that makes the largest element 128 to
  // 256, in E4M3, whose numbers reach 448. It has its three bits down to 2^-6, a 16,000th of the largest element, so one
  // factor does for all rows; one for each would take as many registers as the maxima.
  DFLASH_DEVICE void round_queries(Shared rows, float most) const {
    // The smallest number of F16 is 2^-24. Infinite queries make NaN outputs, as they would without rounding.
    const uint32_t exponent = max(as_bits(most) >> 23, 127u - 24);
    const float factor = as_float((127 * 2 + 7 - exponent) << 23);
    if (thread_index() == 0) store_word(Group::score_factor(), exponent == 255 ? 0x7fc00000u : (exponent - 7) << 23);
    using Pattern = typename State::RoundedQueries;
#pragma unroll 1
    for (int i = thread_index(); i < N * D / 8; i += kTeams * kThreads) {
      const int row = i / (D / 8), vector = i % (D / 8);
      const Shared from = rows + row * kStride + vector * 16;
      const Shared to = Group::rounded_queries() + Pattern::swizzled(row * Pattern::kRow + vector * 8);
      for (int j = 0; j < 2; ++j) {
        const uint32_t low = load_word(from + j * 8), high = load_word(from + j * 8 + 4);
        store_word(to + j * 4, pack_e4m3(first_of(F16{}, low) * factor, second_of(F16{}, low) * factor,
                                         first_of(F16{}, high) * factor, second_of(F16{}, high) * factor));
      }
    }
  }

  // The largest of what the CTA's threads have.
  DFLASH_DEVICE float largest_of_threads(float most) const {
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) most = fmaxf(most, from_lane_xor(most, mask));
    const Shared all = Group::slots() - kWarps * 4;  // behind the rows
    if (Group::lane() == 0) store_word(all + thread_index() / 32 * 4, as_bits(most));
    cta_sync();
    for (int warp = 0; warp < kWarps; ++warp) most = fmaxf(most, as_float(load_word(all + warp * 4)));
    return most;
  }

  DFLASH_DEVICE void store_block(const Segment& s) const {
    const auto locate = [&](int i, int64_t& at, int& slot) {
      slot = i;
      at = qkv_row(p_, s.request, slot, p_.num_heads + grid_x());
      return i < p_.block;
    };
    store_rotated_rows<D, T, Score, Columns::kPlain>({p_.qkv, p_.k_norm, 1}, rope(s), p_.rms_norm_eps, kMaxBlock,
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

  // A step's scores, less the maxima so far unless they are to `kRaise` these. Context row j is visible to slot s if
  // j < length and length + s - j < window; `left` of the segment's rows begin with the step's first, and `seen` says that
  // all of the step's are visible.
  template <bool kRaise>
  DFLASH_DEVICE void make_scores(const State& state, float (&score)[N / 2], const Places& places, bool seen, int left,
                                 Shared rows) const {
    uint32_t keys[D / (kBytes ? 32 : 16)][4];
    Cached::load_keys(keys, rows + places.keys);
    if constexpr (kBytes) {
      State::multiply_key_bytes(score, keys);
      state.template scale_scores<kRaise>(score, places.score_factor);
    } else {
      if (!kRaise) state.start_scores(score);
      State::template multiply_keys<Score>(score, keys, 0, !kRaise);
    }
    if (seen) return;
    const Segment now = segment();
    // The window of slot s begins `s` rows behind this one.
    const int window_begin = now.length - window_of(p_.sliding_window) + 1 - (now.key_end - left);
    mask(score, [&](int slot) { return window_begin + slot; }, [&](int) { return left; });
  }

  DFLASH_DEVICE void attend_keys(State& state, const Places& places, bool seen, int left, Shared rows) const {
    float sums[N / 4];
    for (bool raised = false;; raised = true) {
      float score[N / 2];
      make_scores<false>(state, score, places, seen, left, rows);
      const bool exceeds = state.template weigh<Score>(score, sums, places.weights);
      fence_for_wgmma();
      // Now all weights are there, unless the maxima have to move first: once, for NaN exceeds whatever they are.
      if (!any_of_group(Group::barrier(), kThreads, exceeds) || raised) break;
      make_scores<true>(state, score, places, seen, left, rows);
      state.raise_maxima(score, Group{});
    }
#pragma unroll
    for (int c = 0; c < N / 4; ++c) state.sum[c] += sums[c];
    constexpr int kSteps = kWgmmaKeys / 16;
    uint32_t values[D / 64 * kSteps][4];
    Cached::template load_values<kSteps>(values, rows + places.values);
    state.template add_values<Score, kSteps>(values, places.weights_pattern);
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
    state.take_off_maxima(score);
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
    // So many of the segment's last rows are seen by all block slots.
    const int seen_rows = segment.key_end - (segment.length - window_of(p_.sliding_window) + p_.block);
    const Places places;
    while (stream.next()) {
      const bool seen = stream.left() >= kWgmmaKeys && stream.left() <= seen_rows;
      attend_keys(state, places, seen, stream.left(), stream.rows());
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
