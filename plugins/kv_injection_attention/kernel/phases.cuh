// SPDX-License-Identifier: Apache-2.0
// What a warp of sm_90a's kernel spends its time with: the SM's clock at the end of each phase. Only with
// DFLASH_STAMP_PHASES, which tools/kernel_phases.cu is compiled with; without it no instruction is left of a stamp.
#pragma once

#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// What a warp has behind it, in this order. Each span of a range stamps again from kSpan on.
enum class Phase {
  kStart,       // nothing
  kGridBefore,  // griddepcontrol.wait
  kSpan,        // one warp's schedule, which the others wait for
  kLoads,       // loads of rows issued, pages looked up, copies of the first steps issued
  kRows,        // the block's rows stored, which all wait for
  kFirstStep,   // of the team; not stamped without
  kContext,     // the last step of the team
  kBlock,       // the block, where it is this team's
  kResults,     // results left, which all wait for
  kMerge,       // merged and written
};
inline constexpr int kPhases = static_cast<int>(Phase::kMerge) + 1;

#ifdef DFLASH_STAMP_PHASES
inline constexpr int kStampedCtas = 320, kStampedWarps = 12;
// 0: not stamped.
__device__ long long phase_stamps[kStampedCtas][kStampedWarps][kPhases];

DFLASH_DEVICE void stamp(Phase phase) {
  const int cta = ctaid_y() * static_cast<int>(gridDim.x) + ctaid_x();
  if (tid_x() % 32 == 0 && cta < kStampedCtas) {
    phase_stamps[cta][tid_x() / 32][static_cast<int>(phase)] = clock64();
  }
}
#else
DFLASH_DEVICE void stamp(Phase) {}
#endif

}  // namespace dflash::kv_injection
