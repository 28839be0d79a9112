# SPDX-License-Identifier: Apache-2.0
"""The CPU lowering of FP4 and FP8 against onnx.reference and ml_dtypes, to the last bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator

from dflash_trt.runtime.drafter.onnxruntime.lowering import lower_to_cpu

HEADER = '<ir_version: 11, opset_import: ["" : 23, "trt" : 1]>\n'


def with_initializers(text: str, tensors: list[onnx.TensorProto]) -> onnx.ModelProto:
    model = parser.parse_model(HEADER + text)
    model.graph.initializer.extend(tensors)
    return model


def run_lowered(model: onnx.ModelProto, **feed: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(lower_to_cpu(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feed)


def packed(name: str, dtype: int, shape: list[int], raw: np.ndarray) -> onnx.TensorProto:
    return helper.make_tensor(name, dtype, shape, raw.tobytes(), raw=True)


def scalar(name: str, value: float) -> onnx.TensorProto:
    return helper.make_tensor(name, TensorProto.FLOAT, [], [value])


def finite_e4m3(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    codes = rng.integers(0, 256, shape, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    return codes


@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (3, 48), (64, 512)])
def test_nvfp4_weights_equal_onnx_reference(rows: int, columns: int) -> None:
    """Every byte value in the codes, every finite FP8 value in the block scales."""
    rng = np.random.default_rng(rows)
    tensors = [
        packed(
            "codes", TensorProto.FLOAT4E2M1, [rows, columns], rng.integers(0, 256, rows * columns // 2, dtype=np.uint8)
        ),
        packed("scales", TensorProto.FLOAT8E4M3FN, [rows, columns // 16], finite_e4m3(rng, (rows, columns // 16))),
        scalar("scale_2", 0.0123),
    ]
    text = """weights (float one) => (float[R, K] y) {
        block_scales = DequantizeLinear (scales, scale_2)
        w = DequantizeLinear <axis: int = -1, block_size: int = 16> (codes, block_scales)
        y = Mul (w, one)
    }"""
    model = with_initializers(text, tensors)
    one = np.array(1, dtype=np.float32)
    (expected,) = ReferenceEvaluator(model).run(None, {"one": one})
    (actual,) = run_lowered(model, one=one)
    np.testing.assert_array_equal(actual, expected)


def test_fp8_weights_and_activations_equal_onnx_reference() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((40, 64)) * 10 ** rng.uniform(-4, 4, (40, 64))).astype(np.float32)
    tensors = [
        packed("codes", TensorProto.FLOAT8E4M3FN, [32, 64], finite_e4m3(rng, (32, 64))),
        scalar("w_scale", 0.031),
        scalar("x_scale", 0.7),
        helper.make_tensor("zero", TensorProto.FLOAT8E4M3FN, [], [0.0]),
    ]
    text = """fp8 (float[T, 64] x) => (float[T, 64] y, float[32, 64] w) {
        codes_x = QuantizeLinear (x, x_scale, zero)
        y = DequantizeLinear (codes_x, x_scale)
        w = DequantizeLinear (codes, w_scale)
    }"""
    model = with_initializers(text, tensors)
    expected = ReferenceEvaluator(model).run(None, {"x": x})
    for actual, reference in zip(run_lowered(model, x=x), expected, strict=True):
        np.testing.assert_array_equal(actual, reference)


DYNAMIC = """nvfp4 (float[T, K] x) => (float[T, K] y) {
    codes, block_scales = trt.TRT_FP4DynamicQuantize <axis: int = -1, block_size: int = 16, scale_type: int = 17> (x, s)
    scales = DequantizeLinear (block_scales, s)
    y = DequantizeLinear <axis: int = -1, block_size: int = 16> (codes, scales)
}"""


def dynamic_nvfp4(x: np.ndarray, scale: np.float32) -> np.ndarray:
    """The definition, with ml_dtypes' own conversions: block scales e4m3(amax / 6 s), codes e2m1(x / (bs s))."""
    blocks = x.reshape(-1, 16)
    amax = np.abs(blocks).max(axis=1, keepdims=True)
    ratio = np.minimum(amax / (np.float32(6) * scale), np.float32(448))
    block_scales = ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    unit = block_scales * scale
    quotient = np.divide(blocks, unit, out=np.zeros_like(blocks), where=unit > 0)
    codes = np.clip(quotient, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return (codes * unit).reshape(x.shape)


@pytest.mark.parametrize("scale", [1.0, 0.0037, 17.3])
def test_nvfp4_activations_equal_the_definition(scale: float) -> None:
    """A million values over twelve decades, blocks of zeros, and scales that underflow and saturate."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((512, 2048)) * 10 ** rng.uniform(-6, 6, (512, 128)).repeat(16, axis=1)
    x[3] = 0
    (actual,) = run_lowered(with_initializers(DYNAMIC, [scalar("s", scale)]), x=x.astype(np.float32))
    expected = dynamic_nvfp4(x.astype(np.float32), np.float32(scale))
    assert (actual != expected).sum() == 0


def test_nvfp4_activations_round_ties_to_even() -> None:
    """Block amax 6 and scale 1 make the block scale 1, so that the values are their own quotients."""
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
    x = np.concatenate([ties, -ties, [6.0, 0.1]]).astype(np.float32)[None]
    (actual,) = run_lowered(with_initializers(DYNAMIC, [scalar("s", 1.0)]), x=x)
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    np.testing.assert_array_equal(actual[0], [*even, *(-value for value in even), 6.0, 0.0])
