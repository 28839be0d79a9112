// SPDX-License-Identifier: Apache-2.0
#include "warpgroup.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "emulator.h"

namespace emulator {
namespace {

constexpr uint32_t kPending = 0x7fc0dead;  // a NaN that no operation produces

// Bits `first` to `last` of a descriptor.
uint32_t field(uint64_t descriptor, int first, int last) {
  return static_cast<uint32_t>(descriptor >> first & ((uint64_t{1} << (last - first + 1)) - 1));
}

// [9.7.15.5.1.2.2] matrix-descriptor-encode(x) = (x & 0x3FFFF) >> 4
uint32_t bytes_of(uint64_t descriptor, int first) { return field(descriptor, first, first + 13) << 4; }

constexpr int kRowBytes = 32;  // bytes per row of a product: 16 columns of 16 bits, or 32 of 8

// Words of shared memory that hold the N rows.
std::vector<uint32_t> words_of(uint64_t descriptor, int columns) {
  std::vector<uint32_t> words;
  for (int n = 0; n < columns; ++n) {
    for (int k = 0; k < kRowBytes; k += 4) words.push_back(address_of(descriptor, n, k));
  }
  return words;
}

struct Lane {
  const Wgmma* call;
  std::vector<float> sums;  // before, then after
};

// [9.7.15.5.1.1.1] Figures 148 and 149: a warp has 16 rows; of these a thread has lane / 4 and lane / 4 + 8.
// A of 16 bits: register r has columns 2 (lane % 4) and the next, of row + 8 if r is odd, 8 columns on if r > 1.
// A of 8 bits [9.7.15.5.1.1.3, figure 152]: columns 4 (lane % 4) and the next three, 16 columns on if r > 1.
// D: sum 4 j + 2 h + i is of column 8 j + 2 (lane % 4) + i, of row + 8 h.
int row_of(int thread, int half) { return thread / 32 * 16 + thread % 32 / 4 + half * 8; }

double sum_of(std::span<const double> summands) { return std::accumulate(summands.begin(), summands.end(), 0.0); }

// Hopper truncates the summands of FP8 products to 13 bits after the leading bit of the largest (DeepSeek-V3, arXiv
// 2412.19437, 3.5.2).
double sum_of_13_bits(std::span<double> summands) {
  double most = 0;
  for (const double summand : summands) most = std::fmax(most, std::fabs(summand));
  if (most == 0 || !std::isfinite(sum_of(summands))) return sum_of(summands);
  const double unit = std::ldexp(1.0, std::ilogb(most) - 13);
  for (double& summand : summands) summand = std::trunc(summand / unit) * unit;
  return sum_of(summands);
}

void multiply_all(Lane** lanes) {
  const Wgmma& first = *lanes[0]->call;
  const int columns = 2 * first.sums, bits = first.bits, depth = 8 * kRowBytes / bits, pack = 32 / bits;
  const uint32_t mask = (1u << bits) - 1;
  std::vector<float> left(64 * depth), right(depth * columns);
  for (int thread = 0; thread < 128; ++thread) {
    const Wgmma& call = *lanes[thread]->call;
    if (call.b != first.b || call.sums != first.sums || call.add != first.add || call.bits != bits) {
      fail("threads of a warpgroup differ in a product's descriptor, shape or scale");
    }
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < pack; ++i) {
        const int k = thread % 4 * pack + i + r / 2 * 4 * pack;
        left[row_of(thread, r % 2) * depth + k] = call.decode(call.a[r] >> (bits * i) & mask);
      }
    }
  }
  for (int n = 0; n < columns; ++n) {
    for (int k = 0; k < depth; ++k) {
      const uint32_t at = address_of(first.b, n, k * bits / 8);
      right[k * columns + n] = first.decode(cta().peek(at & ~3u) >> (at % 4 * 8) & mask);
    }
  }
  for (int thread = 0; thread < 128; ++thread) {
    Lane& lane = *lanes[thread];
    for (int s = 0; s < first.sums; ++s) {
      const int row = row_of(thread, s / 2 % 2), column = s / 4 * 8 + thread % 4 * 2 + s % 2;
      double summands[1 + kRowBytes];  // on the stack: allocations took two thirds of a call
      summands[0] = first.add ? lane.sums[s] : 0;
      for (int k = 0; k < depth; ++k) summands[1 + k] = double{left[row * depth + k]} * right[k * columns + column];
      const std::span used(summands, 1 + depth);
      lane.sums[s] = static_cast<float>(bits == 8 ? sum_of_13_bits(used) : sum_of(used));
    }
  }
}

// The latest product under way into `d`, if any.
Product* pending(Products& products, const float* d) {
  Product* found = nullptr;
  const auto look = [&](std::vector<Product>& group) {
    for (Product& product : group) {
      if (product.d == d) found = &product;
    }
  };
  for (auto& group : products.groups) look(group);
  look(products.open);
  return found;
}

void land(Products& products, const Product& product) {
  if (!std::equal(product.a_then.begin(), product.a_then.end(), product.a)) {
    fail("registers that a product under way reads were changed");
  }
  for (const uint32_t at : product.words) cta().end_product_read(at);
  if (pending(products, product.d) != nullptr) return;  // a later one has this one's sums
  for (size_t i = 0; i < product.sums.size(); ++i) {
    if (std::bit_cast<uint32_t>(product.d[i]) != kPending) fail("sums of a product under way were changed");
    product.d[i] = product.sums[i];
  }
}

}  // namespace

uint32_t address_of(uint64_t descriptor, int n, int k) {
  const uint32_t start = bytes_of(descriptor, 0), leading = bytes_of(descriptor, 16), stride = bytes_of(descriptor, 32);
  const uint32_t reserved =
      field(descriptor, 14, 15) | field(descriptor, 30, 31) | field(descriptor, 46, 48) | field(descriptor, 52, 61);
  if (reserved != 0) fail("reserved bits of a descriptor are set");
  if (field(descriptor, 49, 51) != 0) fail("a descriptor's base offset: patterns are taken to begin at their size");
  const uint32_t mode = field(descriptor, 62, 63);  // 0: none, 1: 128 bytes, 2: 64, 3: 32
  const auto row = static_cast<uint32_t>(n), byte = static_cast<uint32_t>(k);
  // Canonical layouts [9.7.15.5.1.2.1.3], T elements being 16 bytes whatever an element has, in bytes:
  //   none ((8,m),(T,2k)) : ((1T,SBO),(1,LBO)); else ((8,m),(T,2k)) : ((T * bytes / 16,SBO),(1,T))
  if (mode == 0) return start + row % 8 * 16 + row / 8 * stride + byte % 16 + byte / 16 * leading;
  const int bits = 4 - static_cast<int>(mode);  // Swizzle<bits, 4, 3> on the address
  const uint32_t at = start + row % 8 * (16u << bits) + row / 8 * stride + byte;
  return at ^ (at >> 3 & ((1u << bits) - 1) << 4);
}

void wgmma(const Wgmma& call) {
  Products& products = cta().products();
  if (!products.fenced) fail("a product without a wgmma.fence since registers were touched");
  const std::vector<uint32_t> words =
      cta().thread() % 32 == 0 ? words_of(call.b, 2 * call.sums) : std::vector<uint32_t>{};
  for (const uint32_t at : words) cta().begin_product_read(at);
  const Product* before = pending(products, call.d);
  Lane mine{&call, before ? before->sums : std::vector<float>(call.d, call.d + call.sums)};
  cta().together<Lane>(call.name, mine, multiply_all, 128);
  products.open.push_back({call.d, mine.sums, call.a, {call.a[0], call.a[1], call.a[2], call.a[3]}, words});
  std::fill(call.d, call.d + call.sums, std::bit_cast<float>(kPending));
}

void wgmma_fence() { cta().products().fenced = true; }

void wgmma_commit_group() {
  Products& products = cta().products();
  products.groups.push_back(std::exchange(products.open, {}));
}

void wgmma_wait_group(int left) {
  Products& products = cta().products();
  products.fenced = false;
  while (static_cast<int>(products.groups.size()) > left) {
    auto group = std::move(products.groups.front());
    products.groups.pop_front();
    while (!group.empty()) {
      const Product product = std::move(group.front());
      group.erase(group.begin());
      products.groups.push_front(group);  // so that later ones of the group count as under way
      land(products, product);
      products.groups.pop_front();
    }
  }
}

}  // namespace emulator
