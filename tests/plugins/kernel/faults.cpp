// SPDX-License-Identifier: Apache-2.0
// faults NAME: two warps do something wrong on purpose, for the emulator to find. "none" does nothing wrong.
// faults e4m3: how often e4m3_by_bits() differs from the emulator's conversion.
#include <bit>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "kv_injection_attention/kernel/e4m3.cuh"

using namespace dflash::kv_injection;

namespace {

constexpr int kSharedBytes = 256;
alignas(16) unsigned char row[16] = {};

void start_copy(int from) {
  if (tid_x() == from) cp_async(0, row, true);
  cp_async_commit_group();
}

const std::map<std::string, std::function<void()>> kFaults{
    {"none",
     [] {
       start_copy(0);
       cp_async_wait_group<0>();
       syncthreads();
       ld_shared(0);
       syncthreads();
       if (tid_x() == 40) st_shared(0, 1);
     }},
    {"two writers", [] { st_shared(0, 1); }},
    {"read without a barrier",
     [] {
       if (tid_x() == 0) st_shared(0, 1);
       if (tid_x() == 40) ld_shared(0);
     }},
    {"write without a barrier",
     [] {
       if (tid_x() == 0) ld_shared(0);
       if (tid_x() == 40) st_shared(0, 1);
     }},
    {"a barrier of the wrong threads",
     [] {
       if (tid_x() == 0) st_shared(0, 1);
       if (tid_x() < 32) bar_sync(1, 32);
       if (tid_x() == 40) ld_shared(0);
     }},
    {"a barrier for one warp of two",
     [] {
       if (tid_x() < 32) syncthreads();
     }},
    {"a loop without end",
     [] {
       for (;;) syncthreads();
     }},
    {"two instructions in a warp", [] { tid_x() % 2 ? void(any_sync(true)) : void(shfl_sync(1, 0)); }},
    {"a read before the copy is waited for", [] { start_copy(0), ld_shared(0); }},
    {"a copy read without a barrier",
     [] {
       start_copy(0);
       cp_async_wait_group<0>();
       if (tid_x() == 40) ld_shared(0);
     }},
    {"a copy over what is read",
     [] {
       if (tid_x() == 0) ld_shared(0);
       start_copy(40);
       cp_async_wait_group<0>();
     }},
    {"a copy nobody waits for", [] { start_copy(0); }},
    {"a misaligned copy", [] { cp_async(8, row, true); }},
    {"a misaligned load", [] { ld_global_v4(row + 4); }},
    {"beyond the shared memory", [] { ld_shared(kSharedBytes); }},
};

void compare_e4m3() {
  int differ = 0;
  const auto compare = [&](uint32_t bits) {
    const float value = std::bit_cast<float>(bits);
    differ += e4m3_by_bits(value) != emulator::encode_e4m3(value);
  };
  for (uint64_t bits = 0; bits < uint64_t{1} << 32; bits += 997) compare(static_cast<uint32_t>(bits));
  for (uint32_t code = 0; code < 0x7e; ++code) {
    const float number = emulator::decode_e4m3(code), next = emulator::decode_e4m3(code + 1);
    for (const float value : {number, (number + next) / 2, next}) {
      const uint32_t bits = std::bit_cast<uint32_t>(value);
      for (const uint32_t near : {bits - 1, bits, bits + 1}) compare(near), compare(near ^ 1u << 31);
    }
  }
  std::printf("%d differ\n", differ);
}

}  // namespace

int main(int, char** arguments) {
  if (arguments[1] == std::string("e4m3")) return compare_e4m3(), 0;
  emulator::Cta cta(64, kSharedBytes, 0, 0, 0);
  cta.run(kFaults.at(arguments[1]));
  return 0;
}
