// SPDX-License-Identifier: Apache-2.0
// Functions that TensorRT calls are noexcept: exceptions are caught here and reported as a line on stderr.
//
// TensorRT offers a logger, but its virtual function table differs between 10 and 11.
#pragma once

#include <exception>

namespace dflash {

// "[dflash_trt] <where>: <what>" on stderr.
void report(const char* where, const char* what) noexcept;

// Returns body(); if it throws, reports the exception and returns `failure`.
template <typename Result, typename Body>
Result guard(const char* where, Result failure, const Body& body) noexcept {
  try {
    return body();
  } catch (const std::exception& error) {
    report(where, error.what());
  } catch (...) {
    report(where, "an exception that is no std::exception");
  }
  return failure;
}

}  // namespace dflash
