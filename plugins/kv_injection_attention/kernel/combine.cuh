// SPDX-License-Identifier: Apache-2.0
// The second kernel combines the partial results of requests that several ranges share. It always adds them in the
// order of the ranges, so equal inputs give equal bits.
//
// Grid: [rows of a request, cut requests]. At most ranges - 1 requests are cut, so ctaid_y() is an index of requests or
// of boundaries between ranges, whichever are fewer.
#pragma once

#include "kv_injection_attention/kernel/result.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"

namespace dflash::kv_injection {

struct CutRequest {
  int request;
  int first, last;  // first and last range; equal if there is nothing to combine
};

DFLASH_DEVICE CutRequest find_cut(const Params& p, const LaunchConfig& config, const Schedule& schedule) {
  const bool by_request = p.batch < config.ranges;
  if (!by_request && ctaid_y() + 1 >= schedule.ranges()) return {};
  const Place place = by_request ? schedule.start_of(ctaid_y()) : schedule.begin(ctaid_y() + 1);
  const int units = schedule.units_of(place.request);
  const int first = schedule.range_of({place.request, place.first_unit, 0}, units);
  const int last = schedule.range_of({place.request, place.first_unit, units - 1}, units);
  // A request is combined at its first boundary. A boundary between two requests needs no combining.
  if (!by_request && (place.unit == 0 || first != ctaid_y())) return {};
  return {place.request, first, last};
}

template <int D, class T>
__global__ void __launch_bounds__(32 * kCombineWarps)
    combine(const __grid_constant__ Params p, const __grid_constant__ LaunchConfig config) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const Schedule schedule(p, config);
  if (schedule.cuts_nothing()) return;  // before anything else is loaded
  const CutRequest cut = find_cut(p, config, schedule);
  if (cut.first == cut.last) return;

  const int warps_per_row = config.combine_warps;
  const int thread = tid_x(), lane = thread % 32, warp = thread / 32;
  const int warp_of_row = warp % warps_per_row;
  const int out_row = ctaid_x() * (kCombineWarps / warps_per_row) + warp / warps_per_row;
  const bool in_bounds = out_row < p.block * p.num_heads;
  const int head = in_bounds ? out_row % p.num_heads : 0;
  const int row = (in_bounds ? out_row / p.num_heads : 0) * config.group + head % config.group;
  const int column = head / config.group * config.row_tiles + row / config.tile_rows;
  const Partials<D> partials(p, config);
  const auto at = [&](int range) {
    return Partials<D>::row(p, config, range, column, range == cut.first) + row % config.tile_rows;
  };

  float maximum = kLeastMaximum;
  for (int range = cut.first + lane; range <= cut.last; range += 32) {
    maximum = fmaxf(maximum, partials.softmax[at(range)].maximum);
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) maximum = fmaxf(maximum, shfl_xor_sync(maximum, mask));

  float sum = 0, output[D / 32] = {};
#pragma unroll 4
  for (int range = cut.first + warp_of_row; range <= cut.last; range += warps_per_row) {
    const Softmax softmax = partials.softmax[at(range)];
    const float weight = ex2_approx(softmax.maximum - maximum);
    sum += weight * softmax.sum;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      output[i] += weight * partials.outputs[at(range) * D + i * 32 + lane];
    }
  }

  // The warps of a row are summed in shared memory: [warp][lane][D / 32 outputs, then the sum].
  constexpr int kValues = D / 32 + 1;
  const Shared own_values = shared_memory() + thread * kValues * 4;
  if (warps_per_row > 1) {
    if (warp_of_row > 0) {
      for (int i = 0; i < D / 32; ++i) st_shared(own_values + i * 4, as_bits(output[i]));
      st_shared(own_values + D / 32 * 4, as_bits(sum));
    }
    syncthreads();
  }
  if (warp_of_row > 0 || !in_bounds) return;
  for (int next = 1; next < warps_per_row; ++next) {
    const Shared other_values = own_values + next * 32 * kValues * 4;
    for (int i = 0; i < D / 32; ++i) output[i] += as_float(ld_shared(other_values + i * 4));
    sum += as_float(ld_shared(other_values + D / 32 * 4));
  }

  const float factor = Softmax{maximum, sum}.factor(p.sinks, head) * config.out_factor;
  const int64_t first = (int64_t{cut.request} * p.block * p.num_heads + out_row) * D;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const int64_t at = first + i * 32 + lane;
    const float value = output[i] * factor;
    if (p.out_dtype == DType::kF8E4M3) {
      static_cast<uint8_t*>(p.out)[at] = static_cast<uint8_t>(to_e4m3x2(value, 0));
    } else {
      static_cast<uint16_t*>(p.out)[at] = static_cast<uint16_t>(cvt_rn_x2(T{}, value, 0));
    }
  }
}

}  // namespace dflash::kv_injection
