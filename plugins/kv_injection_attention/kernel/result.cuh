// SPDX-License-Identifier: Apache-2.0
// Writes a row: its output, or a partial result in the workspace for combine.cuh.
#pragma once

#include "kv_injection_attention/kernel/e4m3.cuh"
#include "kv_injection_attention/kernel/launch_config.h"
#include "kv_injection_attention/kernel/primitives.cuh"
#include "kv_injection_attention/kernel/schedule.cuh"

namespace dflash::kv_injection {

inline constexpr float kLog2E = 1.44269504088896340736f;

// Below every maximum.
inline constexpr float kLeastMaximum = -1e38f;

// Maximum (in log2 units) and sum of a row's weights; the sum is relative to the maximum.
struct Softmax {
  float maximum, sum;

  // Normalisation factor of an output relative to `maximum`, with the sink of `head` included in the sum.
  DFLASH_DEVICE float factor(const float* sinks, int head) const {
    if (sinks == nullptr) return rcp_approx(sum);
    const float sink = sinks[head] * kLog2E;
    const float largest = fmaxf(maximum, sink);
    const float rescale = ex2_approx(maximum - largest);
    return rescale * rcp_approx(sum * rescale + ex2_approx(sink - largest));
  }
};

// The workspace: outputs [partial_rows][D], then Softmax [partial_rows].
template <int D>
struct Partials {
  float* outputs;
  Softmax* softmax;

  DFLASH_DEVICE Partials(const Params& p, const LaunchConfig& config)
      : outputs(static_cast<float*>(p.workspace)),
        softmax(reinterpret_cast<Softmax*>(outputs + partial_rows(p, config) * D)) {}

  // First row of the partial results of CTA (range, column) for the request that it starts or continues. All ranges
  // together have at most 2 kMaxCtas tiles of rows.
  static DFLASH_DEVICE int row(const Params& p, const LaunchConfig& config, int range, int column, bool starts) {
    const int cta = range * columns(p, config) + column;
    return (cta * 2 + (starts ? 1 : 0)) * config.tile_rows;
  }
};

// The query head that query row `row` of a kv head belongs to: rows are slot-major.
DFLASH_DEVICE int query_head(const LaunchConfig& config, int kv_head, int row) {
  return kv_head * config.group + row % config.group;
}

// Destination of a CTA row in the output or the partial results, and the factor of its values.
struct RowOutput {
  int row;
  float factor;
};

// Writes the rows of a CTA to the output if the span is the whole request, else to the partial results. kWhole: it
// always is.
template <int D, class T, bool kWhole = false>
class ResultWriter {
 public:
  DFLASH_DEVICE ResultWriter(const Params& p, const LaunchConfig& config, const StoredSpan& stored, int kv_head)
      : ResultWriter(p, config, stored, stored.load(), kv_head) {}

  // Destination of row `row` of the kv head, row `cta_row` of the CTA. Called by one thread per row.
  DFLASH_DEVICE RowOutput row(int row, int cta_row, Softmax softmax) const {
    if (stored_.is_invalid()) softmax.sum = as_float(0x7fc00000u);  // a NaN sum makes NaN outputs, here or in combine()
    if (is_whole_) {
      const int head = query_head(config_, kv_head_, row);
      return {(request_ * p_.block + row / config_.group) * p_.num_heads + head,
              softmax.factor(p_.sinks, head) * config_.out_factor};
    }
    const int at = first_ + cta_row;
    Partials<D>(p_, config_).softmax[at] = softmax;
    return {at, 1};
  }

  // Writes columns `column`, which is even, and `column` + 1 of an output row; both values are already scaled.
  DFLASH_DEVICE void write(int output_row, int column, float x, float y) const {
    const int64_t at = int64_t{output_row} * D + column;
    if (is_whole_ && p_.out_dtype == DType::kF8E4M3) {
      *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(p_.out) + at) = static_cast<uint16_t>(to_e4m3x2(x, y));
    } else if (is_whole_) {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p_.out) + at) = cvt_rn_x2(T{}, x, y);
    } else {
      float* to = Partials<D>(p_, config_).outputs + at;
      to[0] = x;
      to[1] = y;
    }
  }

 private:
  DFLASH_DEVICE ResultWriter(const Params& p, const LaunchConfig& config, const StoredSpan& stored,
                             const ContextSpan& span, int kv_head)
      : p_(p),
        config_(config),
        stored_(stored),
        request_(span.request),
        kv_head_(kv_head),
        is_whole_(kWhole || (span.starts(p) && span.ends())),
        first_(kWhole ? 0 : Partials<D>::row(p, config, ctaid_y(), ctaid_x(), span.starts(p))) {}

  const Params& p_;
  const LaunchConfig& config_;
  const StoredSpan stored_;  // read on every use to save a register
  int request_, kv_head_;
  bool is_whole_;
  int first_;  // row of partial results
};

}  // namespace dflash::kv_injection
