// SPDX-License-Identifier: Apache-2.0
// The machine that the kernels are written for: every barrier, shared-memory access, asynchronous copy and matrix
// instruction they use. For a host compiler, the emulator in tests/plugins/kernel replaces it.
#pragma once

#include <cstdint>

#include "kv_injection_attention/kernel/architecture.h"

namespace dflash::kv_injection {

// Tags of the two 16-bit formats; a word holds a pair, the first in its low half.
struct F16 {};
struct BF16 {};

struct Words4 {
  uint32_t word[4];
};

}  // namespace dflash::kv_injection

#ifndef __CUDACC__
#include "emulated_primitives.h"
#else

namespace dflash::kv_injection {

#define DFLASH_DEVICE __device__ __forceinline__

using Shared = uint32_t;  // an address in shared memory

// Volatile: read again on every call, so that values computed from them are not kept in registers beyond the caller's
// scope.
#define DFLASH_SPECIAL(NAME, REGISTER)                         \
  DFLASH_DEVICE int NAME() {                                   \
    int value;                                                 \
    asm volatile("mov.u32 %0, %%" REGISTER ";" : "=r"(value)); \
    return value;                                              \
  }
DFLASH_SPECIAL(tid_x, "tid.x")
DFLASH_SPECIAL(ntid_x, "ntid.x")
DFLASH_SPECIAL(ctaid_x, "ctaid.x")
DFLASH_SPECIAL(ctaid_y, "ctaid.y")
#undef DFLASH_SPECIAL

DFLASH_DEVICE Shared shared_memory() {
  extern __shared__ __align__(128) unsigned char memory[];
  return static_cast<Shared>(__cvta_generic_to_shared(memory));
}

// ---- Order among threads and grids

DFLASH_DEVICE void syncthreads() { __syncthreads(); }

// Barrier `id` (1 to 15) of `threads` threads, a multiple of 32; orders their accesses to shared memory.
DFLASH_DEVICE void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Lets the next grid of the stream start early if its launch allows it; that grid still waits for this one's results.
// Grids without these instructions run one after the other (start.cuh).
DFLASH_DEVICE void griddepcontrol_launch_dependents() {
  if constexpr (kArchitecture >= kFirstDependentLaunch) asm volatile("griddepcontrol.launch_dependents;");
}
DFLASH_DEVICE void griddepcontrol_wait() {
  if constexpr (kArchitecture >= kFirstDependentLaunch) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- Lanes of a warp; all 32 take part

DFLASH_DEVICE bool any_sync(bool value) { return __any_sync(~0u, value); }
DFLASH_DEVICE uint32_t ballot_sync(bool value) { return __ballot_sync(~0u, value); }
DFLASH_DEVICE int lowest_set_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }
DFLASH_DEVICE void syncwarp() { __syncwarp(); }
DFLASH_DEVICE int shfl_sync(int value, int lane) { return __shfl_sync(~0u, value, lane); }
DFLASH_DEVICE int shfl_up_sync(int value, int by) { return __shfl_up_sync(~0u, value, by); }
DFLASH_DEVICE float shfl_xor_sync(float value, int mask) { return __shfl_xor_sync(~0u, value, mask); }

// ---- Memory

// Not ld.global.nc, which requires read-only memory: the preceding grid may still write while this kernel runs.
DFLASH_DEVICE Words4 ld_global_v4(const void* from) {
  Words4 words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
               : "l"(__cvta_generic_to_global(from))
               : "memory");
  return words;
}

DFLASH_DEVICE void st_global_v4(void* to, const Words4& words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.word[0]),
               "r"(words.word[1]), "r"(words.word[2]), "r"(words.word[3])
               : "memory");
}

DFLASH_DEVICE void st_shared(Shared to, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

DFLASH_DEVICE uint32_t ld_shared(Shared from) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

DFLASH_DEVICE void st_shared_v4(Shared to, const Words4& words) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words.word[0]), "r"(words.word[1]),
               "r"(words.word[2]), "r"(words.word[3])
               : "memory");
}

// st_shared() of a word that other threads may write at the same time.
DFLASH_DEVICE void st_shared_relaxed(Shared to, uint32_t value) {
  asm volatile("st.relaxed.cta.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

DFLASH_DEVICE Words4 ld_shared_v4(Shared from) {
  Words4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.word[0]), "=r"(words.word[1]), "=r"(words.word[2]), "=r"(words.word[3])
               : "r"(from)
               : "memory");
  return words;
}

// Copies 16 bytes from global memory, or 16 zero bytes; visible after cp_async_wait_group and a barrier.
DFLASH_DEVICE void cp_async(Shared to, const void* from, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(real ? 16 : 0)
               : "memory");
}

DFLASH_DEVICE void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the latest `kPending` of this thread's committed groups are pending.
template <int kPending>
DFLASH_DEVICE void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Matrices

// Four 8x8 matrices of 16-bit elements; lane 8 i + j gives the address of row j of matrix i.
DFLASH_DEVICE void ldmatrix_x4(uint32_t (&m)[4], Shared row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

DFLASH_DEVICE void ldmatrix_x4_trans(uint32_t (&m)[4], Shared row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

#define DFLASH_MMA(TYPE)                                                    \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                \
      ".f32 "                                                               \
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};" \
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]))

// d = c + a * b: 16x16 times 16x8, in FP32.
DFLASH_DEVICE void mma_m16n8k16(F16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                const float (&c)[4]) {
  DFLASH_MMA("f16");
}
DFLASH_DEVICE void mma_m16n8k16(BF16, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                const float (&c)[4]) {
  DFLASH_MMA("bf16");
}
#undef DFLASH_MMA

// ---- Numbers

DFLASH_DEVICE uint32_t cvt_rn_x2(F16, float first, float second) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
DFLASH_DEVICE uint32_t cvt_rn_x2(BF16, float first, float second) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

DFLASH_DEVICE float low_half_to_float(BF16, uint32_t pair) { return __uint_as_float(pair << 16); }
DFLASH_DEVICE float high_half_to_float(BF16, uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
DFLASH_DEVICE float low_half_to_float(F16, uint32_t pair) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(pair)));
  return value;
}
DFLASH_DEVICE float high_half_to_float(F16, uint32_t pair) { return low_half_to_float(F16{}, pair >> 16); }

// Converts four E4M3 bytes to two F16 pairs, exactly; from kFirstFp8 on.
DFLASH_DEVICE void cvt_f16x2_e4m3x2(uint32_t& low, uint32_t& high, uint32_t bytes) {
  if constexpr (kArchitecture >= kFirstFp8) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l;\ncvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
  } else {
    __trap();
  }
}

// Converts two numbers to E4M3 in the low half, the first in the lowest byte, saturating at 448; NaN stays NaN. From
// kFirstFp8 on.
DFLASH_DEVICE uint32_t cvt_e4m3x2(float first, float second) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
}

// Byte i of the result is byte (selector >> 4 i) & 7 of high:low.
DFLASH_DEVICE uint32_t prmt(uint32_t low, uint32_t high, uint32_t selector) { return __byte_perm(low, high, selector); }

DFLASH_DEVICE float as_float(uint32_t bits) { return __uint_as_float(bits); }
DFLASH_DEVICE uint32_t as_bits(float value) { return __float_as_uint(value); }

DFLASH_DEVICE float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DFLASH_DEVICE float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// fma_rn clamped to [0, 1]; NaN becomes 0.
DFLASH_DEVICE float fma_rn_sat(float a, float b, float c) { return __saturatef(__fmaf_rn(a, b, c)); }
DFLASH_DEVICE int vimax3(int a, int b, int c) { return __vimax3_s32(a, b, c); }
DFLASH_DEVICE float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DFLASH_DEVICE float rsqrt_approx(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace dflash::kv_injection

#endif  // __CUDACC__
