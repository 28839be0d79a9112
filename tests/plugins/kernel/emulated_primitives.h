// SPDX-License-Identifier: Apache-2.0
// kernel/primitives.cuh for a host compiler. Layouts follow the tables of the PTX ISA (9.0, "Matrix Fragments for
// mma.m16n8k16", "ldmatrix"), not the kernel's own index arithmetic. Included by primitives.cuh.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "emulator.h"
#include "formats.h"

#define DFLASH_DEVICE inline
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

namespace dflash::kv_injection {

using emulator::cta;
using std::fabs;
using std::max;
using std::min;

using Shared = uint32_t;

inline float decode(F16, uint32_t bits) { return emulator::decode_f16(bits); }
inline float decode(BF16, uint32_t bits) { return emulator::decode_bf16(bits); }
inline uint32_t encode(F16, float value) { return emulator::encode_f16(value); }
inline uint32_t encode(BF16, float value) { return emulator::encode_bf16(value); }
inline const char* name(F16) { return "mma.f16"; }
inline const char* name(BF16) { return "mma.bf16"; }

inline int tid_x() { return cta().thread(); }
inline int ntid_x() { return cta().threads(); }
inline int ctaid_x() { return cta().x; }
inline int ctaid_y() { return cta().y; }
inline Shared shared_memory() { return 0; }

inline void syncthreads() { cta().barrier(0, cta().threads()); }
inline void bar_sync(int id, int threads) { cta().barrier(id, threads); }
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {
  if (kArchitecture >= kFirstDependentLaunch) cta().wait_for_previous_grid();
}

// ---- Lanes

template <class Value>
struct Exchange {
  Value in;
  int argument;
  Value out{};
};

template <class Value, class Source>
Value exchange(const char* instruction, Value value, int argument, Source source) {
  Exchange<Value> mine{value, argument};
  cta().together<Exchange<Value>>(instruction, mine, [&](Exchange<Value>** lanes) {
    for (int i = 0; i < 32; ++i) lanes[i]->out = lanes[source(i, lanes[i]->argument)]->in;
  });
  return mine.out;
}

inline void syncwarp() { cta().synchronize_warp(); }
inline int shfl_sync(int value, int lane) {
  return exchange("shfl_sync", value, lane, [](int, int from) { return from % 32; });
}
inline int shfl_up_sync(int value, int by) {
  return exchange("shfl_up_sync", value, by, [](int i, int n) { return i < n ? i : i - n; });
}
inline float shfl_xor_sync(float value, int mask) {
  return exchange("shfl_xor_sync", value, mask, [](int i, int m) { return i ^ m; });
}

inline uint32_t ballot_sync(bool value) {
  struct Vote {
    bool in;
    uint32_t out;
  } mine{value, 0};
  cta().together<Vote>("ballot_sync", mine, [](Vote** lanes) {
    uint32_t votes = 0;
    for (int i = 0; i < 32; ++i) votes |= static_cast<uint32_t>(lanes[i]->in) << i;
    for (int i = 0; i < 32; ++i) lanes[i]->out = votes;
  });
  return mine.out;
}
inline bool any_sync(bool value) { return ballot_sync(value) != 0; }
inline int lowest_set_bit(uint32_t bits) { return bits == 0 ? -1 : std::countr_zero(bits); }

// ---- Memory

inline Words4 ld_global_v4(const void* from) {
  cta().expect_waited("loads");
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0) emulator::fail("misaligned load");
  Words4 words;
  std::memcpy(&words, from, 16);
  return words;
}
inline void st_global_v4(void* to, const Words4& words) {
  cta().expect_waited("stores");
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0) emulator::fail("misaligned store");
  std::memcpy(to, &words, 16);
}
inline void st_shared(Shared to, uint32_t value) { cta().write_word(to, value); }
inline uint32_t ld_shared(Shared from) { return cta().read_word(from); }
inline void st_shared_v4(Shared to, const Words4& words) {
  if (to % 16 != 0) emulator::fail("misaligned store to %u", to);
  for (uint32_t i = 0; i < 4; ++i) cta().write_word(to + 4 * i, words.word[i]);
}
inline void st_shared_relaxed(Shared to, uint32_t value) { cta().write_word_relaxed(to, value); }
inline Words4 ld_shared_v4(Shared from) {
  if (from % 16 != 0) emulator::fail("misaligned load of %u", from);
  Words4 words;
  for (uint32_t i = 0; i < 4; ++i) words.word[i] = cta().read_word(from + 4 * i);
  return words;
}
inline void cp_async(Shared to, const void* from, bool real) {
  cta().expect_waited("copies");
  cta().copy(to, real ? from : nullptr);
}
inline void cp_async_commit_group() { cta().commit(); }
template <int kPending>
void cp_async_wait_group() {
  cta().wait(kPending);
}

// ---- Matrices

struct MatrixLoad {
  Shared row;
  uint32_t* registers;
  uint32_t words[4];  // the row this lane gives the address of
};

// Lane 4 g + t gets elements 2 t and 2 t + 1 of row g; transposed: of column g.
inline void load_four(const char* instruction, bool transposed, uint32_t (&m)[4], Shared row) {
  if (row % 16 != 0) emulator::fail("misaligned matrix row %u", row);
  MatrixLoad mine{row, m, {}};
  for (uint32_t i = 0; i < 4; ++i) mine.words[i] = cta().read_word(row + 4 * i);
  cta().together<MatrixLoad>(instruction, mine, [transposed](MatrixLoad** lanes) {
    for (int matrix = 0; matrix < 4; ++matrix) {
      const auto element = [&](int r, int c) { return lanes[8 * matrix + r]->words[c / 2] >> (c % 2 * 16) & 0xffff; };
      for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        const uint32_t first = transposed ? element(2 * t, g) : element(g, 2 * t);
        const uint32_t second = transposed ? element(2 * t + 1, g) : element(g, 2 * t + 1);
        lanes[lane]->registers[matrix] = second << 16 | first;
      }
    }
  });
}
inline void ldmatrix_x4(uint32_t (&m)[4], Shared row) { load_four("ldmatrix", false, m, row); }
inline void ldmatrix_x4_trans(uint32_t (&m)[4], Shared row) { load_four("ldmatrix.trans", true, m, row); }

struct Operands {
  float* d;
  const uint32_t *a, *b;
  float c[4];  // a copy: d may be the same registers
};

// Element i of a fragment stands in half i % 2 of register i / 2.
//   A: row = g, or g + 8 for i in {2, 3, 6, 7}; column = 2 t + i % 2, + 8 for i >= 4
//   B: row = 2 t + i % 2, + 8 for i >= 2; column = g
//   C: row = g, or g + 8 for i >= 2; column = 2 t + i % 2
template <class Format>
void mma_m16n8k16(Format, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const float (&c)[4]) {
  Operands mine{d, a, b, {c[0], c[1], c[2], c[3]}};
  cta().together<Operands>(name(Format{}), mine, [](Operands** lanes) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 8; ++i) {
        const uint32_t bits = lanes[lane]->a[i / 2] >> (i % 2 * 16) & 0xffff;
        left[g + (i / 2 % 2) * 8][2 * t + i % 2 + i / 4 * 8] = decode(Format{}, bits);
      }
      for (int i = 0; i < 4; ++i) {
        const uint32_t bits = lanes[lane]->b[i / 2] >> (i % 2 * 16) & 0xffff;
        right[2 * t + i % 2 + i / 2 * 8][g] = decode(Format{}, bits);
      }
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4;
      for (int i = 0; i < 4; ++i) {
        double sum = lanes[lane]->c[i];
        for (int k = 0; k < 16; ++k) sum += double{left[g + i / 2 * 8][k]} * right[k][2 * t + i % 2];
        lanes[lane]->d[i] = static_cast<float>(sum);
      }
    }
  });
}

// ---- Numbers

template <class Format>
uint32_t cvt_rn_x2(Format, float first, float second) {
  return encode(Format{}, second) << 16 | encode(Format{}, first);
}
template <class Format>
float low_half_to_float(Format, uint32_t pair) {
  return decode(Format{}, pair & 0xffff);
}
template <class Format>
float high_half_to_float(Format, uint32_t pair) {
  return decode(Format{}, pair >> 16);
}
inline void cvt_f16x2_e4m3x2(uint32_t& low, uint32_t& high, uint32_t bytes) {
  if (kArchitecture < kFirstFp8) emulator::fail("converts E4M3 on sm_%d", kArchitecture);
  cta().touch_registers();
  const auto value = [bytes](int i) { return emulator::decode_e4m3(bytes >> (8 * i) & 0xff); };
  low = cvt_rn_x2(F16{}, value(0), value(1));
  high = cvt_rn_x2(F16{}, value(2), value(3));
}
// [9.7.9.21, cvt, .satfinite] The first source of the packed form is the upper byte.
inline uint32_t cvt_e4m3x2(float first, float second) {
  if (kArchitecture < kFirstFp8) emulator::fail("converts to E4M3 on sm_%d", kArchitecture);
  return emulator::encode_e4m3(second) << 8 | emulator::encode_e4m3(first);
}
inline uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t all = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> (4 * i) & 7;
    result |= static_cast<uint32_t>(all >> (8 * which) & 0xff) << (8 * i);
  }
  return result;
}
inline float as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t as_bits(float value) { return std::bit_cast<uint32_t>(value); }
inline float ex2_approx(float x) {
  cta().touch_registers();
  return std::exp2(x);
}
inline float fma_rn(float a, float b, float c) {
  cta().touch_registers();
  return std::fma(a, b, c);
}
// [9.7.3, .sat] NaN becomes 0.
inline float fma_rn_sat(float a, float b, float c) {
  const float sum = fma_rn(a, b, c);
  return sum > 0 ? min(sum, 1.0f) : 0.0f;
}
inline int vimax3(int a, int b, int c) { return max(max(a, b), c); }
inline float rcp_approx(float x) { return 1 / x; }
inline float rsqrt_approx(float x) { return 1 / std::sqrt(x); }

}  // namespace dflash::kv_injection
