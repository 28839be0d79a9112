// SPDX-License-Identifier: Apache-2.0
// PackedLinear, x times the transpose of a weight in its storage format, as an operator for ONNX Runtime's CPU
// provider.
#include <algorithm>
#include <utility>

#include "linear/linear.h"
#include "onnxruntime/operator.h"

namespace dflash::ort {
namespace {

constexpr int64_t kMinShared = 1 << 22;  // multiplications from which on waking other threads pays

WeightFormat format_named(const std::string& name) {
  static constexpr std::pair<const char*, WeightFormat> kFormats[] = {{"FLOAT", WeightFormat::kFloat},
                                                                      {"FLOAT16", WeightFormat::kFloat16},
                                                                      {"BFLOAT16", WeightFormat::kBfloat16},
                                                                      {"FP8", WeightFormat::kFp8},
                                                                      {"NVFP4", WeightFormat::kNvfp4},
                                                                      {"INT4", WeightFormat::kInt4}};
  for (const auto& [known, format] : kFormats) {
    if (name == known) return format;
  }
  throw std::invalid_argument("PackedLinear: expected format FLOAT, FLOAT16, BFLOAT16, FP8, NVFP4 or INT4, found " +
                              name);
}

class LinearKernel {
 public:
  static constexpr const char* kName = "PackedLinear";
  static constexpr size_t kNumInputs = 3;  // x, codes, block_scales (NVFP4 and INT4 only)
  static constexpr ElementType input_type(size_t i) { return i == 0 ? kFloat : kUint8; }

  LinearKernel(const Api& api, const KernelInfo* info)
      : api(api),
        multiply_(multiply_columns(instruction_set(api, info))),
        format_(format_named(text(api, info, "format"))),
        scale_(attribute<float>(api, info, "scale")) {}

  void compute(KernelContext* context) const {
    const TensorView x = input(api, context, 0), codes = input(api, context, 1), block_scales = input(api, context, 2);
    const auto expect = [](bool holds, const char* text) { ort::expect(holds, kName, text); };
    expect(x.dims.size() == 2 && codes.dims.size() == 2, "x [M, K] and codes [N, bytes of a row]");
    const bool is_nvfp4 = format_ == WeightFormat::kNvfp4, is_int4 = format_ == WeightFormat::kInt4;
    const int64_t M = x.dims[0], K = x.dims[1], N = codes.dims[0] * (is_int4 ? 2 : 1);
    expect(K % (is_nvfp4 ? 16 : is_int4 ? 32 : 1) == 0, "rows of whole blocks");
    expect(codes.dims[1] == row_bytes(format_, K), "as many codes in a row as x has columns");
    expect(!is_nvfp4 || block_scales.dims == std::vector<int64_t>{N, K / 16}, "block_scales [N, K / 16]");
    expect(!is_int4 || block_scales.dims == std::vector<int64_t>{N, K / 8}, "block_scales [N, K / 8], the bytes of FLOAT");
    Linear linear{.weight = {.format = format_,
                             .rows = N,
                             .cols = K,
                             .codes = static_cast<const uint8_t*>(codes.data),
                             .block_scales = static_cast<const uint8_t*>(block_scales.data),
                             .scale = scale_},
                  .num_rows = M,
                  .x = static_cast<const float*>(x.data),
                  .out = output(api, context, {M, N}),
                  .out_stride = N};
    const auto part = [&](int64_t i) {
      multiply_(linear, i * kColumnsAtATime, std::min(N, (i + 1) * kColumnsAtATime));
    };
    const int64_t count = (N + kColumnsAtATime - 1) / kColumnsAtATime;
    if (M * N * K >= kMinShared) {
      parallel_for(api, context, count, part);
    } else {
      for (int64_t i = 0; i < count; ++i) part(i);
    }
  }

  const Api& api;

 private:
  MultiplyColumns multiply_;
  WeightFormat format_;
  float scale_;
};

}  // namespace

const CustomOp kLinearOperator = make_operator<LinearKernel>();

}  // namespace dflash::ort
