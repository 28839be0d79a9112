// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "paged_attention/paged_attention.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "bindings/bindings.h"

namespace nb = nanobind;

namespace {

using Address = uintptr_t;
using Rows = std::tuple<Address, int64_t, int64_t>;
using Shape = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>;

dflash::HeadRows view(const Rows& rows) {
  const auto [data, head_stride, row_stride] = rows;
  return {.data = reinterpret_cast<const void*>(data), .head_stride = head_stride, .row_stride = row_stride};
}

// Tensors are passed as addresses: converting eight of them by DLPack would take longer than a short attention.
class PassRows {
 public:
  PassRows(const std::vector<int64_t>& begins, const std::vector<int64_t>& num_tokens,
           std::vector<std::vector<int32_t>> pages)
      : pages_(std::move(pages)) {
    if (begins.size() != num_tokens.size() || begins.size() != pages_.size()) {
      throw std::invalid_argument("expected begins, num_tokens and pages of one length");
    }
    int64_t first_row = 0;
    for (size_t i = 0; i < begins.size(); ++i) {
      constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
      expect(begins[i] >= 0 && begins[i] <= kMost, "a position of 31 bits", begins[i]);
      expect(num_tokens[i] >= 1 && num_tokens[i] <= kMost, "at least one token", num_tokens[i]);
      const int64_t needed = (begins[i] + num_tokens[i] + dflash::kTokensPerPage - 1) / dflash::kTokensPerPage;
      expect(static_cast<int64_t>(pages_[i].size()) >= needed, "pages for all tokens of a sequence",
             static_cast<int64_t>(pages_[i].size()));
      // Further reserved pages are neither written nor read; the cache may not have grown to them yet.
      for (int64_t k = 0; k < needed; ++k) {
        expect(pages_[i][k] >= 0, "page ids that are not negative", pages_[i][k]);
        num_pages_ = std::max(num_pages_, int64_t{pages_[i][k]} + 1);
      }
      segments_.push_back(
          {.first_row = first_row, .num_tokens = num_tokens[i], .begin = begins[i], .pages = pages_[i].data()});
      first_row += num_tokens[i];
    }
  }

  PassRows(const PassRows&) = delete;  // the segments point into pages_
  PassRows& operator=(const PassRows&) = delete;

  void attend(const Rows& query, const Rows& key, const Rows& value, Address k_cache, Address v_cache, Address out,
              const Shape& shape, bool is_bf16, float scale, float softcap, int64_t window, Address sinks, int threads,
              Address start, const std::string& isa) const {
    const auto [num_heads, num_kv_heads, head_dim, value_dim, num_pages] = shape;
    expect(num_kv_heads >= 1, "at least one KV head", num_kv_heads);
    expect(num_heads >= 1 && num_heads % num_kv_heads == 0, "a multiple of num_kv_heads heads", num_heads);
    expect(head_dim >= 1, "a head_dim", head_dim);
    expect(value_dim >= 1, "a value_dim", value_dim);
    expect(num_pages >= num_pages_, "a cache that has each page", num_pages);
    expect(window >= 0, "a window, or 0 for none", window);
    const dflash::PagedAttention layer{.type = is_bf16 ? dflash::CacheType::kBf16 : dflash::CacheType::kF32,
                                       .query = view(query),
                                       .key = view(key),
                                       .value = view(value),
                                       .k_cache = reinterpret_cast<void*>(k_cache),
                                       .v_cache = reinterpret_cast<void*>(v_cache),
                                       .out = reinterpret_cast<void*>(out),
                                       .num_heads = num_heads,
                                       .num_kv_heads = num_kv_heads,
                                       .head_dim = head_dim,
                                       .value_dim = value_dim,
                                       .num_pages = num_pages,
                                       .scale = scale,
                                       .softcap = softcap,
                                       .window = window,
                                       .sinks = reinterpret_cast<const float*>(sinks)};
    const dflash::Threads openmp_team{threads, reinterpret_cast<dflash::GompParallel>(start)};
    const nb::gil_scoped_release release;
    dflash::paged_attention(layer, segments_, openmp_team, isa);
  }

 private:
  std::vector<std::vector<int32_t>> pages_;
  std::vector<dflash::SegmentRows> segments_;
  int64_t num_pages_ = 0;  // pages that the cache must have for these page ids
};

}  // namespace

void bind_paged_attention(nb::module_& module) {
  module.attr("TOKENS_PER_PAGE") = dflash::kTokensPerPage;
  module.attr("VALUE_ALIGNMENT") = dflash::kAlignment;
  nb::class_<PassRows>(module, "PassRows")
      .def(nb::init<const std::vector<int64_t>&, const std::vector<int64_t>&, std::vector<std::vector<int32_t>>>(),
           nb::arg("begins"), nb::arg("num_tokens"), nb::arg("pages"))
      .def("attend", &PassRows::attend, nb::arg("query"), nb::arg("key"), nb::arg("value"), nb::arg("k_cache"),
           nb::arg("v_cache"), nb::arg("out"), nb::arg("shape"), nb::arg("is_bf16"), nb::arg("scale"),
           nb::arg("softcap"), nb::arg("window"), nb::arg("sinks"), nb::arg("threads"), nb::arg("start"),
           nb::arg("isa") = "best");
}
