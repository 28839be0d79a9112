// SPDX-License-Identifier: Apache-2.0
// text("expected ", 3, " rows") -> "expected 3 rows".
#pragma once

#include <sstream>
#include <string>

namespace dflash {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace dflash
