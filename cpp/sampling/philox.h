// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>

namespace dflash {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

// Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011): random bits as a stateless function of a counter and a key.
constexpr PhiloxCounter philox4x32(PhiloxCounter counter, PhiloxKey key) {
  constexpr auto low = [](uint64_t product) { return static_cast<uint32_t>(product); };
  constexpr auto high = [](uint64_t product) { return static_cast<uint32_t>(product >> 32); };
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t{0xD2511F53} * counter[0];
    const uint64_t second = uint64_t{0xCD9E8D57} * counter[2];
    counter = {high(second) ^ counter[1] ^ key[0], low(second), high(first) ^ counter[3] ^ key[1], low(first)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

constexpr int kUniformBits = 53;

// Purposes of the random numbers of a position.
enum class Draw : uint32_t { kToken = 0, kProposal = 1, kAcceptance = 2 };

// The uniform number of an output position: u = result / 2^53 in [0, 1).
constexpr uint64_t uniform_bits(uint64_t seed, uint64_t position, Draw draw = Draw::kToken) {
  const auto half = [](uint64_t word, int index) { return static_cast<uint32_t>(word >> (32 * index)); };
  const PhiloxCounter random = philox4x32({half(position, 0), half(position, 1), static_cast<uint32_t>(draw), 0},
                                          {half(seed, 0), half(seed, 1)});
  return (uint64_t{random[0]} << 32 | random[1]) >> (64 - kUniformBits);
}

}  // namespace dflash
