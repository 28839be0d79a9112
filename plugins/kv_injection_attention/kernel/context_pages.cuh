// SPDX-License-Identifier: Apache-2.0
// Finds the addresses of context rows in the page table, kChunkRows rows at a time.
//
// A chunk never crosses a page, whatever the page size. Each lane of a warp looks up one of the next 32 chunks that the
// warp copies, and the other lanes get the address by a shuffle.
#pragma once

#include "kv_injection_attention/kernel/primitives.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"

namespace dflash::kv_injection {

// Address of K in row `key`, the first of a chunk, for a kv head of the span's request. The page size is a power of two
// if there are several pages, so a shift takes the place of a division, and the layout and the table's entry are loaded
// at the same time.
DFLASH_DEVICE const unsigned char* find_chunk(const Params& p, const ContextSpan& span, int kv_head, int key) {
  const int64_t* layout = p.context_layout;
  const Words4 size_and_page = ld_global_v4(layout + kPageSize), kv_and_row = ld_global_v4(layout + kKVStride);
  const int64_t head_stride = layout[kHeadStride], begin = p.context_pointers[p.layer];
  const int shift = lowest_set_bit(size_and_page.word[0]), page = p.max_pages == 1 ? 0 : key >> shift;
  const int64_t entry = p.page_table[int64_t{span.slot} * p.max_pages + page];
  const auto page_stride = static_cast<int64_t>(uint64_t{size_and_page.word[3]} << 32 | size_and_page.word[2]);
  const int row = p.max_pages == 1 ? key : key - (page << shift);
  return reinterpret_cast<const unsigned char*>(begin) + entry * page_stride +
         int64_t{row} * static_cast<int>(kv_and_row.word[2]) + kv_head * head_stride;
}

// Strides in bytes, loaded on every use to save registers.
struct ContextStrides {
  int64_t to_values;
  int row;

  DFLASH_DEVICE explicit ContextStrides(const Params& p) {
    const Words4 words = ld_global_v4(p.context_layout + kKVStride);
    to_values = static_cast<int64_t>(uint64_t{words.word[1]} << 32 | words.word[0]);
    row = static_cast<int>(words.word[2]);
  }
};

// Addresses of the chunks that a warp copies, one per lane.
class ChunkAddresses {
 public:
  // Must be called before the warp's chunks 32 i are used. `key_of(j)` is the first row of its chunk j, `find(key)` the
  // address. Rows from `end` on are not looked up.
  template <class KeyOf, class Find>
  DFLASH_DEVICE void refill(unsigned chunk, int end, KeyOf key_of, Find find) {
    const int key = key_of(chunk + (tid_x() & 31));
    address_ = key < end ? reinterpret_cast<uintptr_t>(find(key)) : 0;
  }
  // All lanes of the warp must pass the same chunk.
  DFLASH_DEVICE const unsigned char* at(unsigned chunk) const {
    const int lane = static_cast<int>(chunk % 32);
    const int low = shfl_sync(static_cast<int>(address_), lane),
              high = shfl_sync(static_cast<int>(address_ >> 32), lane);
    return reinterpret_cast<const unsigned char*>(uint64_t{static_cast<uint32_t>(high)} << 32 |
                                                  static_cast<uint32_t>(low));
  }

 private:
  uint64_t address_;
};

}  // namespace dflash::kv_injection
