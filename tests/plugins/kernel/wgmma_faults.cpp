// SPDX-License-Identifier: Apache-2.0
// wgmma_faults NAME: a warpgroup and one warp more do something wrong on purpose, for the emulator to find.
// wgmma_faults layout DESCRIPTOR: "thread sum value" for each sum of a product whose B is described, in a shared memory
// where the 16 bits at address 2 i are i, and whose A has warp + 1 at [16 warp + k, k] and 0 elsewhere.
// wgmma_faults layout8 DESCRIPTOR DIGIT: the same of bytes, of which byte i is hexadecimal digit DIGIT of i, and whose A
// has warp + 1 at [16 warp + k, k] in warps 0 and 1, at [16 warp + k, k + 16] in warps 2 and 3.
// wgmma_faults exp2: the largest relative error of exp2_by_polynomial(), and what it is of numbers that it clamps.
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "kv_injection_attention/kernel/exp2.cuh"
#include "kv_injection_attention/kernel/wgmma.cuh"

using namespace dflash::kv_injection;

namespace {

constexpr int kBytes = 4096;  // 32 rows of 128 bytes
constexpr uint64_t kMatrix = uint64_t{1} << 62 | uint64_t{64} << 32 | 1 << 16;

bool of_warpgroup() { return tid_x() < 128; }

void write(int value) {
  for (int at = tid_x() * 4; at < kBytes; at += ntid_x() * 4) st_shared(at, value);
}

void write_and_sync() {
  write(0);
  fence_proxy_async();
  syncthreads();
}

// A product of its own registers; `then` runs while it is under way.
void multiply(
    uint64_t matrix, const std::function<void(float*, uint32_t*)>& then = [](float*, uint32_t*) {},
    const std::function<void()>& before = [] {}) {
  float d[16] = {};
  uint32_t a[4] = {};
  wgmma_fence();
  before();
  wgmma(F16{}, d, a, matrix, false);
  wgmma_commit_group();
  then(d, a);
  wgmma_wait_group<0>();
}

const std::map<std::string, std::function<void()>> kFaults{
    {"none",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix);
       syncthreads();
       write(1);
     }},
    {"two products of the same sums",
     [] {
       write_and_sync();
       if (!of_warpgroup()) return;
       float d[16] = {};
       uint32_t a[4] = {};
       wgmma_fence();
       for (int i = 0; i < 2; ++i) wgmma(F16{}, d, a, kMatrix + 2 * i, i > 0), wgmma_commit_group();
       wgmma_wait_group<0>();
       if (d[3] != 0) emulator::fail("found %g", d[3]);
     }},
    {"nothing written",
     [] {
       if (of_warpgroup()) multiply(kMatrix);
     }},
    {"no proxy fence",
     [] {
       write(0);
       syncthreads();
       if (of_warpgroup()) multiply(kMatrix);
     }},
    {"a proxy fence before the write",
     [] {
       fence_proxy_async();
       write(0);
       syncthreads();
       if (of_warpgroup()) multiply(kMatrix);
     }},
    {"a proxy fence of the reader",
     [] {
       write(0);
       syncthreads();
       fence_proxy_async();
       if (of_warpgroup()) multiply(kMatrix);
     }},
    {"no barrier",
     [] {
       write(0);
       fence_proxy_async();
       if (of_warpgroup()) multiply(kMatrix);
     }},
    {"no wgmma.fence",
     [] {
       write_and_sync();
       float d[16] = {};
       const uint32_t a[4] = {};
       if (of_warpgroup()) wgmma(F16{}, d, a, kMatrix, false);
     }},
    {"a register loaded behind wgmma.fence",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix, [](float*, uint32_t*) {}, [] { ld_shared(0); });
     }},
    {"sums changed",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix, [](float* d, uint32_t*) { d[5] = 0; });
     }},
    {"sums read",
     [] {
       write_and_sync();
       if (!of_warpgroup()) return;
       multiply(kMatrix, [](float* d, uint32_t*) {
         if (std::isnan(d[5])) emulator::fail("sums are NaN");
       });
     }},
    {"a left operand changed",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix, [](float*, uint32_t* a) { a[2] = 1; });
     }},
    {"a write while a product reads",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix, [](float*, uint32_t*) { st_shared(0, 1); });
     }},
    {"a write that no barrier orders behind the product",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix);
       if (tid_x() == 128) st_shared(0, 1);
     }},
    {"a product nobody waits for",
     [] {
       write_and_sync();
       if (!of_warpgroup()) return;
       static float d[128][16];
       static uint32_t a[128][4];
       wgmma_fence();
       wgmma(F16{}, d[tid_x()], a[tid_x()], kMatrix, false);
     }},
    {"two descriptors",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix + (tid_x() < 64 ? 0 : 2));
     }},
    {"half a warpgroup",
     [] {
       write_and_sync();
       if (tid_x() < 64) multiply(kMatrix);
     }},
    {"a warp of no warpgroup",
     [] {
       write_and_sync();
       if (tid_x() >= 128) multiply(kMatrix);
     }},
    {"reserved bits",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix | uint64_t{1} << 52);
     }},
    {"a base offset",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix | uint64_t{1} << 49);
     }},
    {"beyond the shared memory",
     [] {
       write_and_sync();
       if (of_warpgroup()) multiply(kMatrix + (uint64_t{64} << 32));
     }},
};

void print_layout(uint64_t matrix) {
  for (int at = tid_x() * 4; at < kBytes; at += ntid_x() * 4) {
    st_shared(at, cvt_rn_x2(F16{}, static_cast<float>(at / 2), static_cast<float>(at / 2 + 1)));
  }
  fence_proxy_async();
  syncthreads();
  if (!of_warpgroup()) return;
  // Figure 148: registers 0 to 3 have rows g, g + 8, g, g + 8 of the warp's 16, and columns 2 t, 2 t, 2 t + 8, 2 t + 8.
  const int thread = tid_x(), g = thread % 32 / 4, t = thread % 4;
  const auto scale = static_cast<float>(thread / 32 + 1);
  const auto at = [&](int row, int k) { return row == k ? scale : 0.0f; };
  uint32_t a[4] = {
      cvt_rn_x2(F16{}, at(g, 2 * t), at(g, 2 * t + 1)),
      cvt_rn_x2(F16{}, at(g + 8, 2 * t), at(g + 8, 2 * t + 1)),
      cvt_rn_x2(F16{}, at(g, 2 * t + 8), at(g, 2 * t + 9)),
      cvt_rn_x2(F16{}, at(g + 8, 2 * t + 8), at(g + 8, 2 * t + 9)),
  };
  float d[16];
  wgmma_fence();
  wgmma(F16{}, d, a, matrix, false);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  for (int i = 0; i < 16; ++i) std::printf("%d %d %g\n", thread, i, d[i]);
}

void print_layout_of_bytes(uint64_t matrix, int digit) {
  const auto value = [digit](int at) { return static_cast<float>(at >> (4 * digit) & 15); };
  for (int at = tid_x() * 4; at < kBytes; at += ntid_x() * 4) {
    st_shared(at, cvt_e4m3x4(value(at), value(at + 1), value(at + 2), value(at + 3)));
  }
  fence_proxy_async();
  syncthreads();
  if (!of_warpgroup()) return;
  // Figure 152: registers 0 to 3 have rows g, g + 8, g, g + 8 of the warp's 16, and four columns from 4 t, 4 t, 4 t + 16,
  // 4 t + 16 on.
  const int thread = tid_x(), g = thread % 32 / 4, t = thread % 4;
  const auto at = [&](int row, int k) {
    return k == row + thread / 64 * 16 ? static_cast<float>(thread / 32 + 1) : 0.0f;
  };
  const auto four = [&](int row, int k) {
    return cvt_e4m3x4(at(row, k), at(row, k + 1), at(row, k + 2), at(row, k + 3));
  };
  uint32_t a[4] = {four(g, 4 * t), four(g + 8, 4 * t), four(g, 4 * t + 16), four(g + 8, 4 * t + 16)};
  float d[16];
  wgmma_fence();
  wgmma(E4M3{}, d, a, matrix, false);
  wgmma_commit_group();
  wgmma_wait_group<0>();
  for (int i = 0; i < 16; ++i) std::printf("%d %d %g\n", thread, i, d[i]);
}

void print_exp2() {
  double worst = 0;
  const auto look = [&](uint32_t first, uint32_t last) {
    for (uint32_t bits = first; bits < last; bits += 256) {
      const float x = std::bit_cast<float>(bits);
      if (x >= -126) worst = std::fmax(worst, std::fabs(exp2_by_polynomial(x) / std::exp2(double{x}) - 1));
    }
  };
  look(0x34000000, std::bit_cast<uint32_t>(9.0f));
  look(0xb4000000, std::bit_cast<uint32_t>(-127.0f));
  std::printf("%.9g", worst);
  for (const float x : {-127.0f, -128.0f, -INFINITY, NAN, 9.0f, 1e30f, INFINITY}) {
    std::printf(" %.9g", exp2_by_polynomial(x));
  }
}

}  // namespace

int main(int count, char** arguments) {
  emulator::Cta cta(160, kBytes, 0, 0, 0);
  if (count == 4) {
    const uint64_t matrix = std::strtoull(arguments[2], nullptr, 0);
    cta.run([=] { print_layout_of_bytes(matrix, std::atoi(arguments[3])); });
  } else if (count == 3) {
    const uint64_t matrix = std::strtoull(arguments[2], nullptr, 0);
    cta.run([=] { print_layout(matrix); });
  } else if (arguments[1] == std::string("exp2")) {
    cta.run([] {
      if (tid_x() == 0) print_exp2();
    });
  } else {
    cta.run(kFaults.at(arguments[1]));
  }
  return 0;
}
