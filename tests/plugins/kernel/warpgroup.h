// SPDX-License-Identifier: Apache-2.0
// wgmma as the PTX ISA describes it [9.7.15], for the threads of emulator.h.
//
// Stops at: threads of a warpgroup in different instructions or with different descriptors; a matrix in shared memory
// that is written while a product reads it, or that some thread wrote without a fence for the async proxy; registers
// touched between the fence and the product, or changed while it is pending; products without a wait. Accumulators are
// NaN until they are waited for.
#pragma once

#include <cstdint>

namespace emulator {

struct Wgmma {
  float* d;  // N / 2 sums of the thread
  int sums;
  const uint32_t* a;  // four registers
  uint64_t b;         // descriptor
  bool add;           // scale-d
  int bits;           // bits per element: 16 or 8
  const char* name;
  float (*decode)(uint32_t bits);
};

void wgmma(const Wgmma& call);
void wgmma_fence();
void wgmma_commit_group();
void wgmma_wait_group(int pending);

// The address of byte k of row n of a K-major matrix in shared memory [9.7.15.5.1.2].
uint32_t address_of(uint64_t descriptor, int n, int k);

}  // namespace emulator
