// SPDX-License-Identifier: Apache-2.0
// kernel/wgmma.cuh for a host compiler. Included by wgmma.cuh. Fragments and descriptors follow the tables of the PTX
// ISA 9.2 (sections in brackets), not the kernel's own index arithmetic.
#pragma once

#include "emulated_primitives.h"
#include "warpgroup.h"

namespace dflash::kv_injection {

inline Shared aligned_shared_memory() { return 0; }

inline void fence_proxy_async() { cta().fence_proxy(); }
inline bool barrier_red_or(int id, int threads, bool value) { return cta().barrier(id, threads, value); }

template <int n>
void fence_registers(float (&)[n]) {}
template <int n>
void fence_registers(uint32_t (&)[n][4]) {}

inline void wgmma_fence() { emulator::wgmma_fence(); }
inline void wgmma_commit_group() { emulator::wgmma_commit_group(); }
template <int pending>
void wgmma_wait_group() {
  emulator::wgmma_wait_group(pending);
}

// [9.7.14.5.16, stmatrix] Lane 4 g + t has elements 2 t and 2 t + 1 of row g of each matrix; transposed, of column g,
// and the addresses are those of the stored rows. So what a lane has of row g and columns 2 t, 2 t + 1 of the matrix it
// holds becomes element g of the rows 2 t and 2 t + 1 that are stored.
inline void stmatrix_x4_trans(Shared column, const uint32_t (&m)[4]) {
  struct MatrixStore {
    Shared row;
    const uint32_t* registers;
    uint32_t words[4];
  } mine{column, m, {}};
  if (column % 16 != 0) emulator::fail("misaligned matrix row %u", column);
  cta().together<MatrixStore>("stmatrix.trans", mine, [](MatrixStore** lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int row = 0; row < 8; ++row) {
        for (int pair = 0; pair < 4; ++pair) {
          const auto element = [&](int g) {
            return lanes[4 * g + row / 2]->registers[matrix] >> (row % 2 * 16) & 0xffff;
          };
          lanes[8 * matrix + row]->words[pair] = element(2 * pair + 1) << 16 | element(2 * pair);
        }
      }
    }
  });
  for (uint32_t i = 0; i < 4; ++i) cta().write_word(column + 4 * i, mine.words[i]);
}

// [9.7.9.21, cvt, .satfinite]
inline uint32_t cvt_e4m3x4(float a, float b, float c, float d) {
  using emulator::encode_e4m3;
  return encode_e4m3(d) << 24 | encode_e4m3(c) << 16 | encode_e4m3(b) << 8 | encode_e4m3(a);
}

// m64nNk16, N = 2 kSums: A in registers, B in shared memory and not transposed.
template <class Format, int kSums>
void wgmma(Format, float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool add) {
  emulator::wgmma({d, kSums, a, b, add, 16, name(Format{}), [](uint32_t bits) { return decode(Format{}, bits); }});
}
// m64nNk32.
template <int kSums>
void wgmma(E4M3, float (&d)[kSums], const uint32_t (&a)[4], uint64_t b, bool add) {
  emulator::wgmma({d, kSums, a, b, add, 8, "mma.e4m3", emulator::decode_e4m3});
}

}  // namespace dflash::kv_injection
