// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace dflash {

// Row-major.
struct Matrix {
  Matrix(size_t rows, size_t cols) : rows(rows), cols(cols), values(rows * cols) {}

  double* operator[](size_t row) { return values.data() + row * cols; }
  const double* operator[](size_t row) const { return values.data() + row * cols; }

  size_t rows;
  size_t cols;
  std::vector<double> values;
};

}  // namespace dflash
