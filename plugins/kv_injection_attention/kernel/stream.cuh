// SPDX-License-Identifier: Apache-2.0
// A team's way through the context: step after step of K and V rows, copied to shared memory ahead of their use.
#pragma once

#include "kv_injection_attention/kernel/plan.h"
#include "kv_injection_attention/kernel/primitives.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"

namespace dflash::kv_injection {

// Who a thread is: its warp has a place among the row groups of a team.
struct Worker {
  int team, row_group;

  DFLASH_DEVICE explicit Worker(const Plan& plan) {
    const int thread = thread_index();
    team = thread / 32 % plan.teams;
    row_group = thread / 32 / plan.teams;
  }
  DFLASH_DEVICE Worker(int of_team, int of_row_group) : team(of_team), row_group(of_row_group) {}
  // Read anew, not kept: registers are short.
  DFLASH_DEVICE int lane() const { return thread_index() & 31; }
  DFLASH_DEVICE int team_thread() const { return row_group * 32 + lane(); }
};

DFLASH_DEVICE int team_threads(const Plan& plan) { return plan.row_groups * 32; }

template <int D, int kElementBytes>
class Stream {
 public:
  static constexpr int kStep = step_keys(D, kElementBytes);
  static constexpr int kStages = num_stages(D, kElementBytes);
  static constexpr int kStride = row_bytes(D, kElementBytes);
  static constexpr int kValuesAt = kStep * kStride;

  DFLASH_DEVICE Stream(const Params& p, const Plan& plan, const Worker& worker,
                       const Segment& segment, int kv_head)
      : p_(p), plan_(plan), worker_(worker) {
    const int row = worker.row_group * kCopyRows + worker.lane() / kCopyLanes;  // the first that this thread copies
    const int vector = worker.lane() % kCopyLanes;
    const int first_key = segment.key_begin + worker.team * kStep;
    const int steps = ceil_div(max(0, segment.key_end - segment.key_begin), kStep);
    left_ = steps > worker.team ? ceil_div(steps - worker.team, teams()) : 0;
    key_ = first_key - team_keys();

    const int64_t plane = int64_t{segment.slot} * p.layers + p.layer;
    const int64_t first_row = plane * p.max_context + first_key + row;
    from_ = first_row * row_step() + int64_t{kv_head} * kRowBytes + vector * 16;
    rows_left_ = segment.key_end - first_key - row;

    current_ = begin() + (kStages - 1) * kStageBytes;  // one before the first
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) load(i < left_, begin() + i * kStageBytes);
  }

  // Goes on to the team's next step. False after the last.
  DFLASH_DEVICE bool next() {
    if (left_ == 0) return false;
    wait_copies<kStages - 2>();
    // Now all threads' copies of this step are there, and all are done with the step before: its stage is free.
    group_sync(1 + worker_.team, 32 * warps());
    load(left_ >= kStages, current_);
    current_ = current_ == begin() + (kStages - 1) * kStageBytes ? begin() : current_ + kStageBytes;
    key_ += team_keys();
    --left_;
    return true;
  }

  // The step's first key, and its rows: K and behind them V. Rows from the segment's end on are 0.
  DFLASH_DEVICE int key() const { return key_; }
  DFLASH_DEVICE Shared rows() const { return current_; }

 private:
  static constexpr int kRowBytes = D * kElementBytes;
  static constexpr int kStageBytes = 2 * kStep * kStride;
  // A warp copies kCopyRows rows at a time, each with kCopyLanes lanes, all of which have a vector of 16 bytes unless
  // D is 96.
  static constexpr int kVectors = kRowBytes / 16;
  static constexpr int kCopyLanes = kVectors == 6 ? 8 : kVectors == 12 ? 16 : kVectors;
  static constexpr int kCopyRows = 32 / kCopyLanes;

  // The next of the team's steps, if there is one.
  DFLASH_DEVICE void load(bool there, Shared stage) {
    if (there && (kVectors == kCopyLanes || worker_.lane() % kCopyLanes < kVectors)) {
      const auto *k = static_cast<const unsigned char*>(p_.k_cache) + from_;
      const auto *v = static_cast<const unsigned char*>(p_.v_cache) + from_;
      int left = rows_left_;
      const auto copy = [&](Shared at) {
        copy_async(at, k, left > 0);
        copy_async(at + kValuesAt, v, left > 0);
        k += copy_rows() * row_step();
        v += copy_rows() * row_step();
        left -= copy_rows();
      };
      for (Shared at = stage + into(); at < stage + kValuesAt; at += copy_rows() * kStride) copy(at);
      from_ += team_keys() * row_step();
      rows_left_ -= team_keys();
    }
    commit_copies();  // an empty group too: wait_copies counts groups
  }

  // Offset in a stage of what this thread copies first. Found anew, as a lane is.
  DFLASH_DEVICE Shared into() const {
    const int lane = worker_.lane();
    return (worker_.row_group * kCopyRows + lane / kCopyLanes) * kStride + lane % kCopyLanes * 16;
  }
  // Rows that the warps of a team copy between them at a time.
  DFLASH_DEVICE int copy_rows() const { return warps() * kCopyRows; }
  DFLASH_DEVICE int warps() const { return plan_.row_groups; }
  // From one of the team's steps to its next.
  DFLASH_DEVICE int team_keys() const { return teams() * kStep; }
  DFLASH_DEVICE int teams() const { return plan_.teams; }
  // Bytes from one context row to the next; 256 rows of 1,024 heads fit in 32 bits.
  DFLASH_DEVICE int row_step() const { return p_.num_kv_heads * kRowBytes; }
  DFLASH_DEVICE Shared begin() const {
    return shared_memory() + plan_.stages_at + worker_.team * (kStages * kStageBytes);
  }

  const Params& p_;
  const Plan& plan_;
  const Worker& worker_;
  int64_t from_;    // offset in the cache of what this thread copies first of the next step, in bytes
  int rows_left_;   // from there to the segment's end
  Shared current_;  // the stage in use
  int key_;         // its first
  int left_;        // steps of the team after it
};

}  // namespace dflash::kv_injection
