# SPDX-License-Identifier: Apache-2.0
"""Graphs with packed weights against ONNX Runtime's folding of the same graph, and that against ONNX's reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator

from dflash_trt import _C
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.errors import EngineError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.onnxruntime import packed_linear
from dflash_trt.runtime.drafter.onnxruntime.graph_session import graph_session
from dflash_trt.runtime.drafter.onnxruntime.lowering import lower_to_cpu
from dflash_trt.runtime.drafter.onnxruntime.packed_linear import PACKED_LINEAR, pack_linear_layers
from tests.engines import build
from tests.paths import FIXTURES

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
    """131,072 values over twelve decades, blocks of zeros, and scales that underflow and saturate."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal((64, 2048)) * 10 ** rng.uniform(-6, 6, (64, 128)).repeat(16, axis=1)
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


DRAFT = FIXTURES / "tiny-gpt-oss-dflash"


def engine(recipe: str, directory: Path) -> Path:
    quantize_checkpoint(read_draft(DRAFT), load_recipe(recipe), directory / "draft")
    build(directory / "draft", directory / "engine")
    return directory / "engine"


def outputs(session: onnxruntime.InferenceSession) -> Sequence[np.ndarray]:
    """Outputs for fixed inputs whose dynamic axes are 3."""
    rng = np.random.default_rng(0)
    feed = {}
    for port in session.get_inputs():
        shape = [size if isinstance(size, int) else 3 for size in port.shape]
        is_float = port.type == "tensor(float)"
        feed[port.name] = rng.standard_normal(shape, np.float32) if is_float else np.ones(shape, np.int32)
    return session.run(None, feed)


def folded(directory: Path, graph: str) -> onnxruntime.InferenceSession:
    """The graph as ONNX Runtime computes its weights."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(directory))
    options.register_custom_ops_library(_C.__file__)
    lowered = lower_to_cpu(onnx.load(directory / graph, load_external_data=False))
    return onnxruntime.InferenceSession(lowered.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("recipe", "bound"), [("bf16", 1e-5), ("int4-w4a16", 1e-5), ("fp8", 0.05), ("mixed-nvfp4-fp8", 0.05)]
)
def test_packed_weights_stay_in_their_file_and_mean_the_same(
    recipe: str, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are rounded otherwise. Where activations are quantised one of them now and then is another code then."""
    monkeypatch.setattr(packed_linear, "MIN_PACKED", 1)
    directory = engine(recipe, tmp_path)
    for graph in ("context.onnx", "draft.onnx"):
        actual, expected = outputs(graph_session(directory, graph)), outputs(folded(directory, graph))
        for a, b in zip(actual, expected, strict=True):
            assert np.abs(a - b).mean() <= bound * np.abs(b).mean()
        check_files(directory, graph)


def check_files(directory: Path, graph: str) -> None:
    """Each matrix of the graph is read where the engine has it."""
    model = onnx.load(directory / graph, load_external_data=False)
    products = ("Gemm", "MatMul")
    num_gemms = sum(node.op_type in products for node in model.graph.node)
    before = {i.external_data[0].value for i in model.graph.initializer if i.external_data}
    pack_linear_layers(model, directory)
    nodes = [node for node in model.graph.node if node.op_type == PACKED_LINEAR]
    assert len(nodes) >= num_gemms
    assert not any(node.op_type in products for node in model.graph.node)
    initializers = {initializer.name: initializer for initializer in model.graph.initializer}
    packed = [initializers[name] for node in nodes for name in node.input[1:]]
    assert {initializer.data_type for initializer in packed} == {TensorProto.UINT8}
    assert {initializer.external_data[0].value for initializer in packed} <= before


def test_small_matrices_are_left_to_onnx_runtime(tmp_path: Path) -> None:
    directory = engine("nvfp4", tmp_path)
    model = onnx.load(directory / "draft.onnx", load_external_data=False)
    pack_linear_layers(model, directory)
    assert not any(node.op_type == PACKED_LINEAR for node in model.graph.node)


@pytest.mark.parametrize("change", [{"transB": 0}, {"transB": 1, "alpha": 2.0}])
def test_another_product_stays_what_it_is(
    change: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "MIN_PACKED", 1)
    directory = engine("bf16", tmp_path)
    model = onnx.load(directory / "draft.onnx", load_external_data=False)
    gemm = next(node for node in model.graph.node if node.op_type == "Gemm")
    name = gemm.name
    del gemm.attribute[:]
    gemm.attribute.extend(helper.make_attribute(key, value) for key, value in change.items())
    pack_linear_layers(model, directory)
    assert [node.op_type for node in model.graph.node if node.name == name] == ["Gemm"]


def test_weights_outside_the_directory_are_refused(tmp_path: Path) -> None:
    directory = engine("bf16", tmp_path)
    (directory / "model.safetensors").rename(tmp_path / "elsewhere")
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match=r"draft\.onnx: expected a graph that onnxruntime .* loads") as raised:
        graph_session(directory, "draft.onnx")
    assert "cp -rL" in str(raised.value.hint)


@pytest.mark.parametrize(("min_packed", "recipe"), [(1, "nvfp4"), (512, "bf16")])
def test_a_short_file_is_said(min_packed: int, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "MIN_PACKED", min_packed)
    directory = engine(recipe, tmp_path)
    (directory / "model.safetensors").write_bytes(b"short")
    with pytest.raises(EngineError, match=r"draft\.onnx: expected a graph that onnxruntime .* loads"):
        graph_session(directory, "draft.onnx")


@pytest.mark.parametrize("where", ["initializer", "attribute", "subgraph"])
@pytest.mark.parametrize("location", ["../secret", "{parent}/secret"])
def test_no_file_outside_the_directory_can_be_named(where: str, location: str, tmp_path: Path) -> None:
    directory = engine("bf16", tmp_path)
    (tmp_path / "secret").write_bytes(bytes(8))
    tensor = TensorProto(name="secret", data_type=TensorProto.INT64, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location.format(parent=tmp_path))
    model = onnx.load(directory / "draft.onnx", load_external_data=False)
    constant = helper.make_node("Constant", [], ["secret"])
    constant.attribute.add(name="value", type=onnx.AttributeProto.TENSOR, t=tensor)
    read = helper.make_node("Identity", ["secret"], ["read"])
    match where:
        case "initializer":
            model.graph.initializer.append(tensor)
            model.graph.node.append(read)
        case "attribute":
            model.graph.node.extend([constant, read])
        case "subgraph":
            branch = helper.make_graph([constant, read], "branch", [], [helper.make_empty_tensor_value_info("read")])
            model.graph.node.append(helper.make_node("If", [""], ["read"], then_branch=branch, else_branch=branch))
    model.graph.output.append(helper.make_tensor_value_info("read", TensorProto.INT64, [1]))
    (directory / "draft.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(EngineError, match=r"draft\.onnx: expected a graph that onnxruntime .* loads"):
        graph_session(directory, "draft.onnx")
