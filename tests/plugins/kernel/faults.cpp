// SPDX-License-Identifier: Apache-2.0
// faults NAME: two warps do something wrong on purpose, for the emulator to find. "none" does nothing wrong.
#include <cstring>
#include <functional>
#include <map>
#include <string>

#include "kv_injection_attention/kernel/primitives.cuh"

using namespace dflash::kv_injection;

namespace {

constexpr int kSharedBytes = 256;
alignas(16) unsigned char row[16] = {};

void start_copy(int from) {
  if (thread_index() == from) copy_async(0, row, true);
  commit_copies();
}

const std::map<std::string, std::function<void()>> kFaults{
    {"none",
     [] {
       start_copy(0);
       wait_copies<0>();
       cta_sync();
       load_word(0);
       cta_sync();
       if (thread_index() == 40) store_word(0, 1);
     }},
    {"two writers", [] { store_word(0, 1); }},
    {"read without a barrier",
     [] {
       if (thread_index() == 0) store_word(0, 1);
       if (thread_index() == 40) load_word(0);
     }},
    {"write without a barrier",
     [] {
       if (thread_index() == 0) load_word(0);
       if (thread_index() == 40) store_word(0, 1);
     }},
    {"a barrier of the wrong threads",
     [] {
       if (thread_index() == 0) store_word(0, 1);
       if (thread_index() < 32) group_sync(1, 32);
       if (thread_index() == 40) load_word(0);
     }},
    {"a barrier for one warp of two", [] { if (thread_index() < 32) cta_sync(); }},
    {"two instructions in a warp",
     [] { thread_index() % 2 ? void(any_lane(true)) : void(from_lane(1, 0)); }},
    {"a read before the copy is waited for", [] { start_copy(0), load_word(0); }},
    {"a copy read without a barrier",
     [] {
       start_copy(0);
       wait_copies<0>();
       if (thread_index() == 40) load_word(0);
     }},
    {"a copy over what is read",
     [] {
       if (thread_index() == 0) load_word(0);
       start_copy(40);
       wait_copies<0>();
     }},
    {"a copy nobody waits for", [] { start_copy(0); }},
    {"a misaligned copy", [] { copy_async(8, row, true); }},
    {"a misaligned load", [] { load_words(row + 4); }},
    {"beyond the shared memory", [] { load_word(kSharedBytes); }},
};

}  // namespace

int main(int, char** arguments) {
  emulator::Cta cta(64, kSharedBytes, 0, 0, 0);
  cta.run(kFaults.at(arguments[1]));
  return 0;
}
