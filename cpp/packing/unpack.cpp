// SPDX-License-Identifier: Apache-2.0
#include "packing/unpack.h"

#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "packing/parallel.h"

namespace dflash {
namespace {

constexpr int64_t kMinPart = 1 << 16;  // codes: what a thread is worth starting for

constexpr std::array<float, 16> kE2m1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// By code: sign, 4 bits of exponent with bias 7, 3 of significand; 0x7f and 0xff are NaN.
std::array<float, 256> e4m3_values() {
  std::array<float, 256> values;
  for (int code = 0; code < 256; ++code) {
    const int exponent = code >> 3 & 15, significand = code & 7;
    float value = exponent == 0 ? std::ldexp(float(significand), -9)
                                : std::ldexp(float(8 + significand), exponent - 10);
    if ((code & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
    values[code] = code & 0x80 ? -value : value;
  }
  return values;
}

const std::array<float, 256>& e4m3() {
  static const std::array<float, 256> values = e4m3_values();
  return values;
}

template <class Matrix>
void check_shape(const char* name, const Matrix& matrix, int64_t rows, int64_t cols) {
  if (matrix.rows == rows && matrix.cols == cols) return;
  throw std::invalid_argument(std::string("expected ") + name + " of shape [" + std::to_string(rows) +
                              ", " + std::to_string(cols) + "], found [" + std::to_string(matrix.rows) +
                              ", " + std::to_string(matrix.cols) + "]");
}

template <class Part>
void for_ranges(int64_t count, int threads, Part part) {
  if (threads < 0) {
    throw std::invalid_argument("expected threads >= 0 (0: all), found " + std::to_string(threads));
  }
  parallel_max(count, kBlock, kMinPart, threads, [&](int64_t begin, int64_t end) {
    part(begin, end);
    return 0;
  });
}

}  // namespace

void unpack_fp8(ConstBytes codes, float scale, Floats out, int threads) {
  check_shape("out", out, codes.rows, codes.cols);
  std::array<float, 256> values = e4m3();
  for (float& value : values) value *= scale;
  for_ranges(codes.rows * codes.cols, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out.data[i] = values[codes.data[i]];
  });
}

void unpack_nvfp4(ConstBytes data, ConstBytes scales, float scale_2, Floats out, int threads) {
  const int64_t rows = data.rows, cols = 2 * data.cols;
  if (cols % kBlock != 0) {
    throw std::invalid_argument("expected columns in multiples of 16, the NVFP4 block, found " +
                                std::to_string(cols));
  }
  check_shape("scales", scales, rows, cols / kBlock);
  check_shape("out", out, rows, cols);
  const std::array<float, 256>& e4m3_by_code = e4m3();
  for_ranges(rows * cols, threads, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin / kBlock; block < end / kBlock; ++block) {
      const float unit = e4m3_by_code[scales.data[block]] * scale_2;
      float values[16];
      for (int code = 0; code < 16; ++code) values[code] = kE2m1[code] * unit;
      const uint8_t* bytes = data.data + block * (kBlock / 2);
      float* numbers = out.data + block * kBlock;
      for (int i = 0; i < kBlock / 2; ++i) {
        numbers[2 * i] = values[bytes[i] & 15];
        numbers[2 * i + 1] = values[bytes[i] >> 4];
      }
    }
  });
}

}  // namespace dflash
