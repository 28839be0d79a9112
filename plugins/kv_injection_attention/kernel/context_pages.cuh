// SPDX-License-Identifier: Apache-2.0
// Finds the addresses of context rows in the page table, kChunkRows rows at a time.
//
// A chunk never crosses a page, whatever the page size. Each lane of a warp looks up one of the next 32 chunks that the
// warp copies, and the other lanes get the address by a shuffle.
#pragma once

#include "kv_injection_attention/kernel/primitives.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"

namespace dflash::kv_injection {

// Address of K in row `key`, the first of a chunk, for a kv head of the span's request. If the page does not exist, the
// request is invalid and page 0 is read in its place. The page size is a power of two if there are several pages, so a
// shift takes the place of a division, and the layout and the table's entry are loaded at the same time.
DFLASH_DEVICE const unsigned char* find_chunk(const Params& p, const StoredSpan& stored, const ContextSpan& span,
                                              int kv_head, int key) {
  int64_t layout[kLayoutSize];
  load_integers(layout, p.context_layout);
  const int64_t begin = p.context_pointers[p.layer * kPointerSize + kAddress];
  const int shift = lowest_set_bit(static_cast<uint32_t>(layout[kPageSize]));
  const int page = p.max_pages == 1 ? 0 : key >> shift;
  int entry = p.page_table[int64_t{span.slot} * p.max_pages + page];
  if (static_cast<uint32_t>(entry) >= static_cast<uint32_t>(layout[kNumPages])) {
    entry = 0;
    stored.invalidate();
  }
  const int row = p.max_pages == 1 ? key : key - (page << shift);
  return reinterpret_cast<const unsigned char*>(begin) + entry * layout[kPageStride] +
         int64_t{row} * static_cast<int>(layout[kRowStride]) + kv_head * layout[kHeadStride];
}

// Strides in bytes, loaded on every use to save registers.
struct ContextStrides {
  int64_t to_values;
  int row;

  DFLASH_DEVICE explicit ContextStrides(const Params& p) {
    const Words4 words = ld_global_v4(p.context_layout + kKVStride);
    to_values = join(words.word[0], words.word[1]);
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
