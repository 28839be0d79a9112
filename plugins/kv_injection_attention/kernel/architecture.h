// SPDX-License-Identifier: Apache-2.0
// What older GPUs lack. A compute capability is a number here, 10 * major + minor, as in sm_89.
#pragma once

namespace dflash::kv_injection {

// What a kernel is compiled for.
#ifdef DFLASH_ARCHITECTURE  // by the emulator
inline constexpr int kArchitecture = DFLASH_ARCHITECTURE;
#elif defined(__CUDA_ARCH__)
inline constexpr int kArchitecture = __CUDA_ARCH__ / 10;
#else
inline constexpr int kArchitecture = 0;  // the host's part of a .cu file
#endif

// The first whose code waits for the grid before its own (griddepcontrol), so that it may be started early.
inline constexpr int kFirstDependentLaunch = 90;

// The first that converts E4M3 numbers.
inline constexpr int kFirstFp8 = 89;

}  // namespace dflash::kv_injection
