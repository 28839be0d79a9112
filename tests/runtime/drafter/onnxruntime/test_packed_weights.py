# SPDX-License-Identifier: Apache-2.0
"""Graphs with packed weights against ONNX Runtime's folding of the same graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from dflash_trt import _C
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.errors import EngineError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.onnxruntime import packed_linear
from dflash_trt.runtime.drafter.onnxruntime.lowering import lower_to_cpu
from dflash_trt.runtime.drafter.onnxruntime.ort_session import graph_session
from dflash_trt.runtime.drafter.onnxruntime.packed_linear import PACKED_LINEAR, pack_linear_layers
from tests.engines import build
from tests.paths import FIXTURES

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
    lowered = lower_to_cpu(onnx.load(directory / graph, load_external_data=False), keep_attention=True)
    return onnxruntime.InferenceSession(lowered.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(("recipe", "bound"), [("bf16", 1e-5), ("nvfp4-w4a16", 1e-5), ("fp8", 0.05), ("nvfp4", 0.05)])
@pytest.mark.parametrize("graph", ["context.onnx", "draft.onnx"])
def test_packed_weights_mean_the_same(
    recipe: str, bound: float, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are rounded otherwise. Where activations are quantised one of them now and then is another code then."""
    monkeypatch.setattr(packed_linear, "MIN_PACKED", 1)
    directory = engine(recipe, tmp_path)
    actual, expected = outputs(graph_session(directory, graph)), outputs(folded(directory, graph))
    for a, b in zip(actual, expected, strict=True):
        assert np.abs(a - b).mean() <= bound * np.abs(b).mean()


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4", "mixed-nvfp4-fp8"])
@pytest.mark.parametrize("graph", ["context.onnx", "draft.onnx"])
def test_each_matrix_stays_in_its_file(
    recipe: str, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "MIN_PACKED", 1)
    directory = engine(recipe, tmp_path)
    model = onnx.load(directory / graph, load_external_data=False)
    num_gemms = sum(node.op_type == "Gemm" for node in model.graph.node)
    before = {i.external_data[0].value for i in model.graph.initializer if i.external_data}
    pack_linear_layers(model, directory)
    nodes = [node for node in model.graph.node if node.op_type == PACKED_LINEAR]
    assert len(nodes) >= num_gemms
    assert not any(node.op_type == "Gemm" for node in model.graph.node)
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


@pytest.mark.parametrize("min_packed", [1, 512])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
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
