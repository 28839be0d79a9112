// SPDX-License-Identifier: Apache-2.0
#include "acceptance/greedy.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace dflash {

int64_t accept_greedy(std::span<const int64_t> proposals, std::span<const int64_t> verified) {
  if (verified.size() != proposals.size() + 1) {
    throw std::invalid_argument("expected one verified token more than proposals (" +
                                std::to_string(proposals.size() + 1) + "), found " +
                                std::to_string(verified.size()));
  }
  return std::ranges::mismatch(proposals, verified).in1 - proposals.begin();
}

}  // namespace dflash
