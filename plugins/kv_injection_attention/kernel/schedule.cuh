// SPDX-License-Identifier: Apache-2.0
// Decides which context rows a CTA reads.
//
// The context rows that each request sees are divided into units. All requests' units, laid end to end, are divided
// into ranges, one for each CTA of a column. Depending on the lengths, which only the device knows, either each request
// is cut into the same number of equal parts or, if lengths differ much, the concatenation is cut, so that a CTA may
// continue one request and start others. Starting a request is charged as reading some units.
#pragma once

#include "kv_injection_attention/kernel/launch_config.h"
#include "kv_injection_attention/kernel/primitives.cuh"

namespace dflash::kv_injection {

// A request's context. If its slot, length or layout is invalid, as in the arbitrary values with which TensorRT's
// builder times a node, the cache is not read: the request counts as one without context, and its output is NaN.
struct RequestContext {
  int slot;    // negative if slot, length or layout is invalid
  int length;  // context rows
  int begin;   // first row that any block slot sees, rounded down to a multiple of kChunkRows
  int units;   // at least 1, because the block belongs to the last one
};

DFLASH_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

DFLASH_DEVICE int64_t join(uint32_t low, uint32_t high) { return static_cast<int64_t>(uint64_t{high} << 32 | low); }

// Loads `n` adjacent 64-bit integers, an even number; the first is 16-byte aligned.
template <int n>
DFLASH_DEVICE void load_integers(int64_t (&values)[n], const int64_t* from) {
#pragma unroll
  for (int i = 0; i < n; i += 2) {
    const Words4 pair = ld_global_v4(from + i);
    values[i] = join(pair.word[0], pair.word[1]);
    values[i + 1] = join(pair.word[2], pair.word[3]);
  }
}

// Longest context that a row of the page table can hold; 0 if pointer or layout is invalid.
DFLASH_DEVICE int most_rows(const Params& p) {
  int64_t pointer[kPointerSize], layout[kLayoutSize];
  load_integers(pointer, p.context_pointers + p.layer * kPointerSize);
  load_integers(layout, p.context_layout);
  return most_context_rows(p.max_pages, pointer, layout);
}

// First row of a context that is read; see RequestContext. A window of one position shows no row: its pages need not
// exist.
DFLASH_DEVICE int first_row(const Params& p, int length) {
  const int visible = max(0, length - window_of(p.sliding_window) + 1);
  return visible < length ? visible / kChunkRows * kChunkRows : length;
}

// `most` is most_rows().
DFLASH_DEVICE RequestContext context_of(const Params& p, int most, int index) {
  const int length = p.context_lengths[index], slot = p.slot_ids[index];
  if (length < 0 || length > most || most == 0 || slot < 0 || slot >= p.slots) return {-1, 0, 0, 1};
  const int begin = first_row(p, length);
  return {slot, length, begin, max(1, ceil_div(length - begin, kUnitKeys))};
}

// A unit, by its index within its request; first_unit makes it an index among all units.
struct Place {
  int request;
  int first_unit;  // the request's first unit, among all units
  int unit;        // index within the request

  DFLASH_DEVICE int number() const { return first_unit + unit; }
};

// Work of a CTA: the request and unit it begins with, and the number of units.
struct Task {
  int request, unit, units;
};

// The units of all requests. Each lane of a warp has some of the requests; whole warps must call the functions.
class Schedule {
 public:
  DFLASH_DEVICE Schedule(const Params& p, const LaunchConfig& config)
      : p_(p), lane_(tid_x() % 32), requests_per_lane_(ceil_div(p.batch, 32)), most_(most_rows(p)) {
    int longest = 0;
    if (requests_per_lane_ == 1) {  // not a loop, which would wait for the layout first and then for the lengths
      if (lane_ < p.batch) lane_units_ = longest = context(lane_).units;
    } else {
#pragma unroll 1
      for (int i = first_request(); i < end_request(); ++i) {
        const int units = context(i).units;
        lane_units_ += units;
        longest = max(longest, units);
      }
    }
    int inclusive_sum = lane_units_;
    // Lanes after the last request have no units and need no sums.
#pragma unroll 1
    for (int offset = 1; offset < 32 && offset < p.batch; offset *= 2) {
      const int below = shfl_up_sync(inclusive_sum, offset), other = shfl_up_sync(longest, offset);
      if (lane_ < offset) continue;
      inclusive_sum += below;
      longest = max(longest, other);
    }
    units_before_ = inclusive_sum - lane_units_;
    const int last = min(p.batch, 32) - 1;
    total_ = shfl_sync(inclusive_sum, last);
    longest = shfl_sync(longest, last);

    const int best = worthwhile_ranges(config, total_);
    ranges_ = max(best, min(p.batch, config.ranges));
    parts_ = max(1, quotient(best, p.batch));
    start_cost_ = min(config.start_cost, quotient(total_, ranges_));
    // Cutting requests must save more than combining costs. If combining is free, this decides as the test below.
    if (p.batch <= config.ranges && longest - quotient(total_, ranges_) <= config.combine_cost) {
      parts_ = 1;
      ranges_ = p.batch;
      return;
    }
    // Compares the largest part with the cost of an average range.
    if (p.batch <= config.ranges && longest * ranges_ <= costs() * parts_) {
      ranges_ = parts_ * p.batch;
    } else {
      parts_ = 0;
    }
  }

  // Whether each request is a range of its own, so that there is nothing to combine.
  DFLASH_DEVICE bool cuts_nothing() const { return parts_ == 1; }
  // Number of ranges that may have work.
  DFLASH_DEVICE int ranges() const { return ranges_; }
  // First unit of a range.
  DFLASH_DEVICE Place begin(int range) const {
    if (parts_ == 0) return at_cost(cost_before(range));
    const Task task = part(range);
    return {task.request, start_of(task.request).first_unit, task.unit};
  }
  DFLASH_DEVICE Task task(int range) const {
    if (parts_ > 0) return part(range);
    const Place begin = at_cost(cost_before(range));
    const int end = range + 1 < ranges_ ? at_cost(cost_before(range + 1)).number() : total_;
    return {begin.request, begin.unit, end - begin.number()};
  }
  // Last range that begins at or before a unit of a request with `units` units.
  DFLASH_DEVICE int range_of(const Place& place, int units) const {
    if (parts_ > 0) return place.request * parts_ + quotient((place.unit + 1) * parts_ - 1, units);
    return ((place.number() + (place.request + 1) * start_cost_ + 1) * ranges_ - 1) / costs();
  }

  DFLASH_DEVICE Place start_of(int request) const {
    const int owner = requests_per_lane_ == 1 ? request : request / requests_per_lane_;
    int unit = units_before_;
    if (lane_ == owner) {
      for (int i = first_request(); i < request; ++i) unit += context(i).units;
    }
    return {request, shfl_sync(unit, owner), 0};
  }
  // All lanes of the warp must pass the same request.
  DFLASH_DEVICE int units_of(int request) const {
    return requests_per_lane_ == 1 ? shfl_sync(lane_units_, request) : context(request).units;
  }

 private:
  DFLASH_DEVICE RequestContext context(int request) const { return context_of(p_, most_, request); }

  // a / b without a division instruction. Exact for a below two million: a / b + 1 / 2b is at least 1 / 2b away from an
  // integer, and an error of two units in the last place is smaller.
  static DFLASH_DEVICE int quotient(int a, int b) {
    return static_cast<int>((static_cast<float>(a) + 0.5f) * rcp_approx(static_cast<float>(b)));
  }

  // Task of a range if all requests are cut into equal parts.
  DFLASH_DEVICE Task part(int range) const {
    const int request = quotient(range, parts_), index = range - request * parts_;
    const int units = units_of(request), begin = quotient(index * units, parts_);
    return {request, begin, quotient((index + 1) * units, parts_) - begin};
  }

  DFLASH_DEVICE int cost_before(int range) const { return range * costs() / ranges_; }

  // Cost of reading all units and starting all requests. The largest intermediate, 256 requests of 4,097 units, doubled
  // and times 320 ranges, fits in 32 bits.
  DFLASH_DEVICE int costs() const { return total_ + p_.batch * start_cost_; }

  // Unit reached after spending `cost`. A request's start is paid before its first unit.
  DFLASH_DEVICE Place at_cost(int cost) const {
    int left = cost - units_before_ - first_request() * start_cost_;
    const int requests = max(0, end_request() - first_request());
    const bool owns_unit = left >= 0 && left < lane_units_ + requests * start_cost_;
    Place place{first_request(), units_before_, 0};
    while (owns_unit) {
      const int units = context(place.request).units;
      if (left < units + start_cost_) break;
      left -= units + start_cost_;
      ++place.request;
      place.first_unit += units;
    }
    place.unit = max(0, left - start_cost_);
    const int owner = lowest_set_bit(ballot_sync(owns_unit));
    return {shfl_sync(place.request, owner), shfl_sync(place.first_unit, owner), shfl_sync(place.unit, owner)};
  }

  DFLASH_DEVICE int first_request() const { return lane_ * requests_per_lane_; }
  DFLASH_DEVICE int end_request() const { return min(p_.batch, first_request() + requests_per_lane_); }

  const Params& p_;
  int lane_, requests_per_lane_;
  int most_;  // most_rows()
  int lane_units_ = 0;
  int units_before_, total_, ranges_;
  int parts_;       // parts per request; 0 if the concatenation is cut
  int start_cost_;  // cost of starting a request, in units
};

// The context of one request that a CTA reads: units `begin` to `end`.
struct ContextSpan {
  int request;
  int slot;                // the request's slot; negative if slot, length or layout is invalid
  int begin, end;          // units within the request
  int length;              // context rows of the request
  int key_begin, key_end;  // rows of the span

  ContextSpan() = default;
  // Takes at most `units` units from `first` on.
  DFLASH_DEVICE ContextSpan(const Params& p, int index, int first, int units) : request(index), begin(first) {
    const RequestContext all = context_of(p, most_rows(p), request);
    slot = all.slot;
    end = min(begin + units, all.units);
    length = all.length;
    key_begin = all.begin + begin * kUnitKeys;
    key_end = min(length, all.begin + end * kUnitKeys);
  }

  // Whether the span has the request's first unit, and its last unit, to which the block belongs. Recomputed to save
  // registers.
  DFLASH_DEVICE bool starts(const Params& p) const { return key_begin == first_row(p, length); }
  DFLASH_DEVICE bool ends() const { return key_end == length; }
};

// A CTA's span and the remainder of its range, in shared memory: registers are scarce, and reloading lengths takes
// time.
struct StoredSpan {
  Shared first, second;  // 16 bytes each

  // Stores the span of a task's first request. Called by one warp.
  DFLASH_DEVICE void store(const Params& p, const Task& task) const {
    ContextSpan now{};
    int left = -1;
    if (task.units > 0) {
      now = ContextSpan(p, task.request, task.unit, task.units);
      left = task.units - (now.end - now.begin);
    }
    if (tid_x() > 0) return;
    const int visible_to_all = now.key_end - (now.length - window_of(p.sliding_window) + p.block);
    const auto word = [](int value) { return static_cast<uint32_t>(value); };
    st_shared_v4(first, {{word(now.request), word(now.slot), word(now.length), word(now.key_begin)}});
    st_shared_v4(second, {{word(now.key_end), word(left), word(visible_to_all), now.slot < 0}});
  }
  // Whether the request is invalid: it then has no rows, or an entry of its pages is out of range. Complete after the
  // last page was looked up.
  DFLASH_DEVICE bool is_invalid() const { return ld_shared(second + 12) != 0; }
  DFLASH_DEVICE void invalidate() const { st_shared_relaxed(second + 12, 1); }
  // The stored span, without `begin` and `end`.
  DFLASH_DEVICE ContextSpan load() const {
    const Words4 words = ld_shared_v4(first);
    ContextSpan now{};
    now.request = static_cast<int>(words.word[0]);
    now.slot = static_cast<int>(words.word[1]);
    now.length = static_cast<int>(words.word[2]);
    now.key_begin = static_cast<int>(words.word[3]);
    now.key_end = static_cast<int>(ld_shared(second));
    return now;
  }
  // Remainder of the range after this span; negative units if the range is empty.
  DFLASH_DEVICE Task rest() const {
    return {static_cast<int>(ld_shared(first)) + 1, 0, static_cast<int>(ld_shared(second + 4))};
  }
  // Number of rows, counted from the end of the span, that the window hides from no slot.
  DFLASH_DEVICE int rows_visible_to_all() const { return static_cast<int>(ld_shared(second + 8)); }
};

// Calls `attend` for each span of the CTA's range. One warp computes the schedule: if all did, their loads, shuffles
// and divisions would contend.
template <class Attend>
DFLASH_DEVICE void attend_range(const Params& p, const LaunchConfig& config, const StoredSpan& span, Attend attend) {
  if (tid_x() < 32) {
    const Schedule schedule(p, config);
    span.store(p, ctaid_y() < schedule.ranges() ? schedule.task(ctaid_y()) : Task{});
  }
  syncthreads();
  if (span.rest().units < 0) return;
  for (;;) {
    attend();
    const Task rest = span.rest();
    if (rest.units == 0) return;
    syncthreads();  // shared memory is free for the next span
    if (tid_x() < 32) span.store(p, rest);
    syncthreads();
  }
}

}  // namespace dflash::kv_injection
