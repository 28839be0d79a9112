// SPDX-License-Identifier: Apache-2.0
// Which context rows a CTA reads.
//
// The context rows that each request sees are cut into units; all requests' units, laid end to end, are cut into
// equal ranges, one for each CTA of a column. So ragged lengths, which only the device knows, balance by themselves,
// and a CTA leaves at most two unfinished requests: the one it continues and the one it starts.
#pragma once

#include "kv_injection_attention/kernel/plan.h"
#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// A slot, length or layout out of range, as in the arbitrary values that TensorRT's builder times a node with, reads nothing of
// the cache: the request counts as one without context, and its output is NaN.
struct Request {
  int slot;    // negative if slot or length is out of range
  int length;  // context rows
  int begin;   // the first that any of its block slots sees, or up to 15 before it: a multiple of kChunkRows
  int units;   // at least 1: the block belongs to the last
};

DFLASH_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The longest context that a row of the page table holds; 0 if the layout is none.
DFLASH_DEVICE int most_rows(const Params& p) {
  const int64_t size = p.context_layout[kPageSize];
  const bool divides = p.max_pages == 1 ? size > 0 && size <= kMaxContext : size == 16 || size == 32 || size == 64;
  return divides ? static_cast<int>(min(int64_t{p.max_pages} * size, int64_t{kMaxContext})) : 0;
}

DFLASH_DEVICE Request request_of(const Params& p, int index) {
  const int length = p.context_lengths[index], slot = p.slot_ids[index], most = most_rows(p);
  if (length < 0 || length > most || most == 0 || slot < 0 || slot >= p.slots) return {-1, 0, 0, 1};
  const int begin = max(0, length - window_of(p.sliding_window) + 1) / kChunkRows * kChunkRows;
  return {slot, length, begin, max(1, ceil_div(length - begin, kUnitKeys))};
}

struct RequestStart {
  int request;
  int first_unit;  // of that request
};

// The units of all requests. Every lane of a warp has some of the requests; the functions are for whole warps.
class Schedule {
 public:
  DFLASH_DEVICE Schedule(const Params& p, const Plan& plan)
      : p_(p), lane_(tid_x() % 32), requests_per_lane_(ceil_div(p.batch, 32)) {
    for (int i = first_request(); i < end_request(); ++i) lane_units_ += request_of(p, i).units;
    int inclusive_sum = lane_units_;
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = shfl_up_sync(inclusive_sum, offset);
      if (lane_ >= offset) inclusive_sum += below;
    }
    units_before_ = inclusive_sum - lane_units_;
    total_ = shfl_sync(inclusive_sum, 31);
    ranges_ = worthwhile_ranges(plan, total_);
  }

  // Ranges that have work.
  DFLASH_DEVICE int ranges() const { return ranges_; }
  // The first unit of a range. 256 requests of 4,097 units times 320 ranges fit in 32 bits.
  DFLASH_DEVICE int begin(int range) const { return range * total_ / ranges_; }
  // The largest range that begins at or before `unit`.
  DFLASH_DEVICE int range_of(int unit) const { return ((unit + 1) * ranges_ - 1) / total_; }

  // Of the request that `unit` belongs to.
  DFLASH_DEVICE RequestStart request_at(int unit) const {
    const bool owns_unit = units_before_ <= unit && unit < units_before_ + lane_units_;
    RequestStart start{first_request(), units_before_};
    while (owns_unit) {
      const int units = request_of(p_, start.request).units;
      if (unit < start.first_unit + units) break;
      ++start.request;
      start.first_unit += units;
    }
    const int owner = lowest_set_bit(ballot_sync(owns_unit));
    return {shfl_sync(start.request, owner), shfl_sync(start.first_unit, owner)};
  }

  DFLASH_DEVICE RequestStart start_of(int request) const {
    const int owner = request / requests_per_lane_;
    int unit = units_before_;
    if (lane_ == owner) {
      for (int i = first_request(); i < request; ++i) unit += request_of(p_, i).units;
    }
    return {request, shfl_sync(unit, owner)};
  }

 private:
  DFLASH_DEVICE int first_request() const { return lane_ * requests_per_lane_; }
  DFLASH_DEVICE int end_request() const { return min(p_.batch, first_request() + requests_per_lane_); }

  const Params& p_;
  int lane_, requests_per_lane_;
  int lane_units_ = 0;
  int units_before_, total_, ranges_;
};

// The part of one request that a CTA reads: units `begin` to `end` of it.
struct Segment {
  int request;
  int slot;                // the request's, negative as there
  int begin, end;          // in units of the request
  int length;              // the request's context rows
  int key_begin, key_end;  // the segment's
  bool ends;               // whether it has the request's last unit, and with it the block

  // At most `units` of them.
  DFLASH_DEVICE Segment(const Params& p, int index, int first, int units) : request(index), begin(first) {
    const Request all = request_of(p, request);
    slot = all.slot;
    end = min(begin + units, all.units);
    length = all.length;
    key_begin = all.begin + begin * kUnitKeys;
    key_end = min(length, all.begin + end * kUnitKeys);
    ends = end == all.units;
  }
};

}  // namespace dflash::kv_injection
