// SPDX-License-Identifier: Apache-2.0
// Primitives of sm_90a only: products of a warpgroup whose right operand stays in shared memory. For a host compiler,
// the emulator in tests/plugins/kernel replaces them.
#pragma once

#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// Tag of products of FP8 operands; a word holds four of them, the first in its lowest byte.
struct E4M3 {};

// A swizzled matrix in shared memory with rows of 128 or 64 bytes. Eight rows are a swizzle atom, aligned to its size.
template <int kRowBytes>
struct SwizzledRows {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  static constexpr int kRow = kRowBytes;
  static constexpr int kBytes = 8 * kRowBytes;

  // Offset of byte `at` of the unswizzled matrix. With rows of 128 bytes, 16-byte chunk i of row r is stored at i ^ (r
  // % 8); with rows of 64 bytes, at i ^ (r / 2 % 4).
  static DFLASH_DEVICE uint32_t swizzle(uint32_t at) { return at ^ (at >> 3 & (kRowBytes - 16)); }

  // Matrix descriptor for a right operand: K-major, swizzled by the length of its rows (PTX ISA 9.7.15.5.1.2.2). The
  // stride offset, between groups of eight rows, is one atom; the leading offset is not used and assumed to be 1.
  static DFLASH_DEVICE uint64_t descriptor(uint32_t address) {
    constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : 2, kLeading = 1;
    return kSwizzle << 62 | uint64_t{kBytes >> 4} << 32 | kLeading << 16 | (address & 0x3ffff) >> 4;
  }
};
// A product consumes 32 bytes of a row, 16 columns or 32 of E4M3; the descriptor of the next product is larger by two.
inline constexpr uint64_t kDescribedColumns = 2;

}  // namespace dflash::kv_injection

#ifndef __CUDACC__
#include "emulated_wgmma.h"
#else

namespace dflash::kv_injection {

// The CTA's shared memory, aligned for swizzle atoms.
DFLASH_DEVICE Shared aligned_shared_memory() {
  extern __shared__ __align__(1024) unsigned char aligned[];
  return static_cast<Shared>(__cvta_generic_to_shared(aligned));
}

// ---- Order

// Makes this thread's writes to shared memory visible to wgmma, after the next barrier.
DFLASH_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// bar_sync(id, threads) that also returns whether `value` holds for any of the threads.
DFLASH_DEVICE bool barrier_red_or(int id, int threads, bool value) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\n"
      "barrier.cta.red.or.pred.aligned q, %1, %2, p;\nselp.b32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<int>(value))
      : "memory");
  return any != 0;
}

// A compiler fence for registers that wgmma reads or writes: no access to them moves across it.
template <int n>
DFLASH_DEVICE void fence_registers(float (&values)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int n>
DFLASH_DEVICE void fence_registers(uint32_t (&values)[n][4]) {
#pragma unroll
  for (int i = 0; i < 4 * n; ++i) asm volatile("" : "+r"(values[i / 4][i % 4])::"memory");
}

// Required between any access to registers and a wgmma that uses them.
DFLASH_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DFLASH_DEVICE void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits for all but the last `pending` of this thread's committed groups of products.
template <int pending>
DFLASH_DEVICE void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// ---- Matrices

// Four 8x8 matrices of 16-bit elements, transposed; lane 8 i + j gives the address of column j of matrix i.
DFLASH_DEVICE void stmatrix_x4_trans(Shared column, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(column), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// Converts four numbers to E4M3, the first in the lowest byte, saturating at 448; NaN stays NaN.
DFLASH_DEVICE uint32_t cvt_e4m3x4(float a, float b, float c, float d) {
  uint32_t bytes;
  asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f32 l, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 h, %4, %3;\nmov.b32 %0, {l, h};\n}"
      : "=r"(bytes)
      : "f"(a), "f"(b), "f"(c), "f"(d));
  return bytes;
}

#define DFLASH_REGISTERS8(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define DFLASH_REGISTERS16 \
  DFLASH_REGISTERS8(0, 1, 2, 3, 4, 5, 6, 7) ", " DFLASH_REGISTERS8(8, 9, 10, 11, 12, 13, 14, 15)
#define DFLASH_REGISTERS32 \
  DFLASH_REGISTERS16       \
  ", " DFLASH_REGISTERS8(16, 17, 18, 19, 20, 21, 22, 23) ", " DFLASH_REGISTERS8(24, 25, 26, 27, 28, 29, 30, 31)
#define DFLASH_REGISTERS40 DFLASH_REGISTERS32 ", " DFLASH_REGISTERS8(32, 33, 34, 35, 36, 37, 38, 39)
#define DFLASH_SUMS8(i)                                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define DFLASH_SUMS16 DFLASH_SUMS8(0), DFLASH_SUMS8(8)
#define DFLASH_SUMS32 DFLASH_SUMS16, DFLASH_SUMS8(16), DFLASH_SUMS8(24)
#define DFLASH_SUMS40 DFLASH_SUMS32, DFLASH_SUMS8(32)

// d = d + a * b, or a * b: 64x16 in the warpgroup's registers times 16xN, whose N rows of 16 columns `b` describes.
// d and a may be accessed again after wgmma_wait_group(). For E4M3 it is 64x32 times 32xN. Word r of a thread's left
// operand then has columns 4 (lane % 4) to 4 (lane % 4) + 3, plus 16 if r > 1, of row 16 warp + lane / 4, plus 8 if r
// is odd (PTX ISA 9.2, 9.7.15.5.1.1.3, figure 152), which is how ldmatrix loads rows of bytes.
#define DFLASH_WGMMA(N, HALF, A0, A1, A2, A3, B, ADD, TAG, SHAPE, TRANSPOSE)                        \
  DFLASH_DEVICE void wgmma(TAG, float (&d)[HALF], const uint32_t (&a)[4], uint64_t b, bool add) {   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD                                          \
                 ", 0;\n"                                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" DFLASH_REGISTERS##HALF           \
                 "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", p, 1, 1" TRANSPOSE ";\n}"   \
                 : DFLASH_SUMS##HALF                                                                \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add))); \
  }
#define DFLASH_WGMMAS(...)                                    \
  DFLASH_WGMMA(__VA_ARGS__, F16, "k16.f32.f16.f16", ", 0")    \
  DFLASH_WGMMA(__VA_ARGS__, BF16, "k16.f32.bf16.bf16", ", 0") \
  DFLASH_WGMMA(__VA_ARGS__, E4M3, "k32.f32.e4m3.e4m3", "")
DFLASH_WGMMAS(32, 16, 16, 17, 18, 19, 20, 21)
DFLASH_WGMMAS(64, 32, 32, 33, 34, 35, 36, 37)
DFLASH_WGMMAS(80, 40, 40, 41, 42, 43, 44, 45)
#undef DFLASH_WGMMAS
#undef DFLASH_WGMMA
#undef DFLASH_SUMS40
#undef DFLASH_SUMS32
#undef DFLASH_SUMS16
#undef DFLASH_SUMS8
#undef DFLASH_REGISTERS40
#undef DFLASH_REGISTERS32
#undef DFLASH_REGISTERS16
#undef DFLASH_REGISTERS8

}  // namespace dflash::kv_injection

#endif  // __CUDACC__
