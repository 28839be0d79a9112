// SPDX-License-Identifier: Apache-2.0
// The attention kernel. Grid: [kv heads * row tiles, ranges].
//
// A CTA holds the query rows of one kv head (S slots times N/G heads, so that a cache row is read once for all of
// them) and goes through one range of the context, request by request. Its warps form teams; a team goes through its
// own steps of the context at its own pace, each of its warps with its own rows.
#pragma once

#include "kv_injection_attention/kernel/merge.cuh"
#include "kv_injection_attention/kernel/result.cuh"
#include "kv_injection_attention/kernel/rows.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"
#include "kv_injection_attention/kernel/state.cuh"
#include "kv_injection_attention/kernel/stream.cuh"

namespace dflash::kv_injection {

template <class A, class B, bool kFirst>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<A, B, false> {
  using Type = B;
};

// T is the block's format. An FP8 cache is widened to F16, exactly, so its products are F16 products; the block's own
// values stay in T, whose range they may use.
template <int D, class T, bool kBytes>
class Attention {
 public:
  DFLASH_DEVICE Attention(const Params& p, const Plan& plan)
      : p_(p), plan_(plan), worker_(plan) {}

  DFLASH_DEVICE void run(const Segment& segment) {
    Stream<D, kBytes ? 1 : 2> stream(p_, plan_, worker_, segment, kv_head());
    store_queries(segment);
    if (segment.ends) store_block(segment);
    cta_sync();

    // All threads of the CTA meet in the same barriers, whichever of the two their warp takes.
    const int tiles = (plan_.tile_rows - warp_row()) / 16;
    tiles >= kMostTiles ? attend<kMostTiles>(segment, stream) : attend<1>(segment, stream);
    cta_sync();  // shared memory is free for the next segment
  }

 private:
  static constexpr int kMostTiles = warp_tiles(D);
  static constexpr int kStep = step_keys(D, kBytes ? 1 : 2);
  static constexpr int kStride = row_bytes(D, 2);
  static_assert(kMostTiles <= 2);
  using Score = typename Choose<F16, T, kBytes>::Type;
  using Context = Stream<D, kBytes ? 1 : 2>;

  DFLASH_DEVICE int kv_head() const { return grid_x() / plan_.row_tiles; }
  // The first row of the CTA, counted over all row tiles; of the warp, counted in the CTA.
  DFLASH_DEVICE int first_row() const { return grid_x() % plan_.row_tiles * plan_.tile_rows; }
  DFLASH_DEVICE int warp_row() const { return worker_.row_group * 16 * kMostTiles; }

  // Row of the (request, kv head) that a thread's row is, counted over all row tiles.
  DFLASH_DEVICE int row(int t, int half) const {
    return first_row() + warp_row() + t * 16 + half * 8 + worker_.lane() / 4;
  }

  DFLASH_DEVICE int slot(int t, int half) const { return row(t, half) / plan_.group; }
  DFLASH_DEVICE int head(int row) const { return kv_head() * plan_.group + row % plan_.group; }

  DFLASH_DEVICE const float* rope(const Segment& s) const {
    return p_.rope + int64_t{s.request} * p_.block * D;
  }

  DFLASH_DEVICE void store_queries(const Segment& s) {
    const auto locate = [&](int i, int64_t& at, int& slot) {
      const int r = first_row() + i;
      slot = r / plan_.group;
      at = qkv_row(p_, s.request, slot, head(r));
      return r < plan_.rows;
    };
    constexpr Columns kColumns = kBytes ? Columns::kPairs : Columns::kPlain;
    const float eps = s.slot < 0 ? as_float(0x7fc00000u) : p_.rms_norm_eps;  // NaN queries make NaN outputs
    // Products with the context's keys are scores in units of log2. The k_scale of 16-bit keys is 1.
    const float factor = kBytes ? p_.softmax_scale * p_.k_scale : p_.softmax_scale;
    store_rotated_rows<D, T, Score, kColumns>({p_.qkv, p_.q_norm, factor, kLog2E}, rope(s), eps,
                                              plan_.tile_rows, shared_memory(), locate);
  }

  DFLASH_DEVICE void store_block(const Segment& s) {
    const auto locate = [&](int i, int64_t& at, int& slot) {
      slot = i;
      at = qkv_row(p_, s.request, slot, p_.num_heads + kv_head());
      return i < p_.block;
    };
    constexpr Columns kColumns = kBytes ? Columns::kPairs : Columns::kPlain;
    store_rotated_rows<D, T, Score, kColumns>({p_.qkv, p_.k_norm, 1}, rope(s), p_.rms_norm_eps,
                                              plan_.block_rows, block_keys(), locate);

    constexpr int kVectors = D / 8;
    for (int i = thread_index(); i < plan_.block_rows * kVectors; i += thread_count()) {
      int64_t at;
      int slot;
      const bool real = locate(i / kVectors, at, slot);
      const auto* rows = static_cast<const unsigned char*>(p_.qkv);
      // Behind all keys: as many rows of D further on as there are of them.
      const Words vector = real ? load_words(rows + (at + p_.num_kv_heads) * D * 2 + i % kVectors * 16) : Words{};
      store_vector<kBytes ? Columns::kEvenOdd : Columns::kPlain>(
          block_values() + i / kVectors * kStride, i % kVectors, vector);
    }
  }

  DFLASH_DEVICE Shared block_keys() const { return shared_memory() + plan_.block_at; }
  DFLASH_DEVICE Shared block_values() const { return block_keys() + plan_.block_rows * kStride; }

  // The context and the block, with the warp's `kTiles` tiles of rows.
  template <int kTiles>
  DFLASH_DEVICE void attend(const Segment& segment, Context& stream) {
    State<D, kTiles> state;
    const Queries<D, kTiles> queries(shared_memory() + warp_row() * kStride, worker_.lane());
    while (stream.next()) {
#pragma unroll 1
      for (int j = 0; j < kStep; j += kMatrixKeys) {
        const Shared keys = stream.rows() + j * Context::kStride;
        attend_keys(state, queries, segment, stream.key() + j, keys, keys + Context::kValuesAt);
      }
    }
    if (kBytes) state.scale_outputs(p_.v_scale);
    if (segment.ends) read_block(state);
    merge_teams(state, plan_, worker_);
    if (worker_.team == 0) {
      state.finish_sums();
      write(state, segment);
    }
  }

  // Context row j is visible to slot s if j < length and length + s - j < window.
  template <int kTiles>
  DFLASH_DEVICE void attend_keys(State<D, kTiles>& state, const Queries<D, kTiles>& queries, const Segment& segment,
                                 int first, Shared keys, Shared values) {
    // The window of slot s begins `s` rows behind this one.
    const int window_begin = segment.length - window_of(p_.sliding_window) + 1 - first;
    const int end = segment.key_end - first;
    Block<D, kTiles, Score, Score, kBytes> block(worker_.lane());
    const auto score = [&](const State<D, kTiles>* from) {
      block.multiply_keys(queries, keys, from);
      if (end < kMatrixKeys || window_begin + p_.block > 1) {
        block.mask([&](int t, int half) { return window_begin + slot(t, half); }, [&](int, int) { return end; });
      }
    };
    score(&state);
    if (!block.weigh(state)) {
      score(nullptr);
      block.raise_and_weigh(state, 1);
    }
    block.add_values(state, values);
  }

  // Block slot j is visible to slot s if |s - j| < window, and if causal j <= s.
  template <int kTiles>
  DFLASH_DEVICE void read_block(State<D, kTiles>& state) {
    // Read again, not kept: registers are short while the context is read.
    const Queries<D, kTiles> queries(shared_memory() + warp_row() * kStride, worker_.lane());
    const int window = min(window_of(p_.sliding_window), kMaxBlock);
#pragma unroll 1
    for (int begin = worker_.team * kMatrixKeys; begin < p_.block; begin += plan_.teams * kMatrixKeys) {
      Block<D, kTiles, Score, T, false> block(worker_.lane());
      block.multiply_keys(queries, block_keys() + begin * kStride, nullptr);
      block.mask([&](int t, int half) { return slot(t, half) - window + 1 - begin; },
                [&](int t, int half) {
                  const int ahead = p_.causal ? 1 : window;
                  return min(p_.block, slot(t, half) + ahead) - begin;
                });
      block.raise_and_weigh(state, 1 / p_.k_scale);  // the block's keys have no scale
      block.add_values(state, block_values() + begin * kStride);
    }
  }

  template <int kTiles>
  DFLASH_DEVICE void write(const State<D, kTiles>& state, const Segment& segment) {
    const bool whole = segment.begin == 0 && segment.ends;
    const int64_t first = Partials<D>::row(p_, plan_, grid_y(), grid_x(), segment.begin == 0);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Softmax softmax{state.maximum(t, half), state.sum[t][half]};
        const int r = row(t, half);
        if (r >= plan_.rows) continue;
        if (whole) {
          write_output(state.output[t], half, softmax, segment.request, r);
        } else {
          write_partial(state.output[t], half, softmax, first + (r - first_row()));
        }
      }
    }
  }

  // Calls put(column, x, y) for each pair of neighbouring columns of the thread's row.
  template <class Put>
  DFLASH_DEVICE void for_pairs(const float (&output)[D / 8][4], int half, Put put) const {
    const int quad_lane = worker_.lane() % 4;
#pragma unroll
    for (int n = 0; n < D / 8; n += 2) {
      const float *a = &output[n][2 * half], *b = &output[n + 1][2 * half];
      if constexpr (kBytes) {  // a has even columns, b odd ones
        put(n * 8 + quad_lane * 4, a[0], b[0]);
        put(n * 8 + quad_lane * 4 + 2, a[1], b[1]);
      } else {
        put(n * 8 + quad_lane * 2, a[0], a[1]);
        put(n * 8 + 8 + quad_lane * 2, b[0], b[1]);
      }
    }
  }

  DFLASH_DEVICE void write_output(const float (&output)[D / 8][4], int half, const Softmax& softmax,
                                  int request, int r) const {
    const int64_t at =
        (int64_t{request} * p_.block + r / plan_.group) * p_.num_heads + head(r);
    const float factor = softmax.factor(p_.sinks, head(r));
    auto* out = static_cast<uint32_t*>(p_.out) + at * (D / 2);
    for_pairs(output, half, [&](int column, float x, float y) {
      out[column / 2] = pack(T{}, x * factor, y * factor);
    });
  }

  DFLASH_DEVICE void write_partial(const float (&output)[D / 8][4], int half,
                                   const Softmax& softmax, int64_t at) const {
    const Partials<D> partials(p_, plan_);
    if (worker_.lane() % 4 == 0) partials.softmax[at] = softmax;
    for_pairs(output, half, [&](int column, float x, float y) {
      partials.outputs[at * D + column] = x;
      partials.outputs[at * D + column + 1] = y;
    });
  }

  const Params& p_;
  const Plan& plan_;
  const Worker worker_;
};

template <int D, class T, bool kBytes>
__global__ void __launch_bounds__(32 * max_warps(D), 2)
    attention(const __grid_constant__ Params p, const __grid_constant__ Plan plan) {
  release_next_grid();
  wait_for_previous_grid();  // all that is read may be its: the block, slots and lengths, rows just appended
  const Schedule schedule(p, plan);
  if (grid_y() >= schedule.ranges()) return;
  const int first = schedule.begin(grid_y());
  int units = schedule.begin(grid_y() + 1) - first;
  const Place place = schedule.find(first);
  int request = place.request, begin = first - place.first_unit;
  while (units > 0) {
    const Segment segment(p, request, begin, units);
    Attention<D, T, kBytes>(p, plan).run(segment);
    units -= segment.end - segment.begin;
    ++request;
    begin = 0;
  }
}

}  // namespace dflash::kv_injection
