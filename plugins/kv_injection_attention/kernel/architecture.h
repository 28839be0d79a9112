// SPDX-License-Identifier: Apache-2.0
// Features that older GPUs lack. Compute capabilities are numbers, 10 * major + minor, as in sm_89.
#pragma once

namespace dflash::kv_injection {

// The architecture that device code is compiled for.
#ifdef DFLASH_ARCHITECTURE  // the emulator of the tests
inline constexpr int kArchitecture = DFLASH_ARCHITECTURE;
#elif defined(__CUDA_ARCH__)
inline constexpr int kArchitecture = __CUDA_ARCH__ / 10;
#else
inline constexpr int kArchitecture = 0;  // host code of a .cu file
#endif

// First with programmatic dependent launch: griddepcontrol waits for the preceding grid, so a kernel may start early.
inline constexpr int kFirstDependentLaunch = 90;

// First with instructions that convert E4M3.
inline constexpr int kFirstFp8 = 89;

}  // namespace dflash::kv_injection
