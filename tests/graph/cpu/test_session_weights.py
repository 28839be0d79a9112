# SPDX-License-Identifier: Apache-2.0
"""Weights as sessions get them against ONNX Runtime's folding of the same graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from dflash_trt import _C
from dflash_trt._C import unpack_fp8, unpack_nvfp4
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.errors import EngineError
from dflash_trt.graph.cpu import session_weights, stored_weights
from dflash_trt.graph.cpu.lowering import lower_to_cpu
from dflash_trt.graph.cpu.ort_session import graph_session
from dflash_trt.graph.cpu.session_weights import PACKED_LINEAR, ROOT, mapped_weights
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.engines import build
from tests.paths import FIXTURES

DRAFT = FIXTURES / "tiny-gpt-oss-dflash"


def engine(recipe: str, directory: Path) -> Path:
    quantize_checkpoint(read_draft(DRAFT), load_recipe(recipe), directory / "draft")
    build(directory / "draft", directory / "engine")
    return directory / "engine"


def outputs(session: onnxruntime.InferenceSession) -> Sequence[np.ndarray]:
    """Of fixed inputs whose dynamic axes are 3; slot_ids, which may be a table of pages, are slots here."""
    rng = np.random.default_rng(0)
    feed = {}
    for port in session.get_inputs():
        shape = [size if isinstance(size, int) else 3 for size in port.shape or ["B"]]
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


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4", "mixed-nvfp4-fp8"])
@pytest.mark.parametrize("graph", ["context.onnx", "draft.onnx"])
def test_float_weights_equal_folded_constants(
    recipe: str, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_weights, "PIECE", 64)  # more than one for each matrix, and rows longer than that
    monkeypatch.setattr(session_weights, "MIN_PACKED", 2**40)
    directory = engine(recipe, tmp_path)
    for actual, expected in zip(
        outputs(graph_session(directory, graph)), outputs(folded(directory, graph)), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(("recipe", "bound"), [("bf16", 1e-5), ("nvfp4-w4a16", 1e-5), ("fp8", 0.05), ("nvfp4", 0.05)])
@pytest.mark.parametrize("graph", ["context.onnx", "draft.onnx"])
def test_packed_weights_mean_the_same(
    recipe: str, bound: float, graph: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are rounded otherwise. Where activations are quantised one of them now and then is another code then."""
    monkeypatch.setattr(session_weights, "MIN_PACKED", 1)
    directory = engine(recipe, tmp_path)
    actual, expected = outputs(graph_session(directory, graph)), outputs(folded(directory, graph))
    for a, b in zip(actual, expected, strict=True):
        assert np.abs(a - b).mean() <= bound * np.abs(b).mean()


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4", "mixed-nvfp4-fp8"])
def test_each_matrix_stays_in_the_file_and_the_rest_is_float(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_weights, "MIN_PACKED", 1)
    directory = engine(recipe, tmp_path)
    model = onnx.load(directory / "draft.onnx", load_external_data=False)
    num_layers = len(read_draft(DRAFT).spec.layers)
    with mapped_weights(model, directory, keep_packed=True):
        nodes = [node for node in model.graph.node if node.op_type == PACKED_LINEAR]
        assert len(nodes) >= 4 * num_layers
        assert not any(node.op_type == "Gemm" for node in model.graph.node)
        external = {i.name: i for i in model.graph.initializer if i.data_location == TensorProto.EXTERNAL}
        packed = {name for node in nodes for name in node.input[1:]}
        assert packed < external.keys()
        assert {external[name].data_type for name in packed} == {TensorProto.UINT8}
        assert {file_of(external[name]).parent for name in packed} == {directory}
        assert {external[name].data_type for name in external.keys() - packed} == {TensorProto.FLOAT}
        written = {file for file in map(file_of, external.values()) if file.parent != directory}
    assert written
    assert not any(file.parent.exists() for file in written)


def file_of(initializer: TensorProto) -> Path:
    (location,) = (entry.value for entry in initializer.external_data if entry.key == "location")
    return ROOT / location


def test_small_matrices_are_float(tmp_path: Path) -> None:
    directory = engine("nvfp4", tmp_path)
    model = onnx.load(directory / "draft.onnx", load_external_data=False)
    with mapped_weights(model, directory, keep_packed=True):
        types = {i.data_type for i in model.graph.initializer if i.data_location == TensorProto.EXTERNAL}
        assert types == {TensorProto.FLOAT}
        assert not any(node.op_type == PACKED_LINEAR for node in model.graph.node)


@pytest.mark.parametrize("change", [{"transB": 0}, {"transB": 1, "alpha": 2.0}])
def test_another_product_stays_what_it_is(
    change: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_weights, "MIN_PACKED", 1)
    directory = engine("bf16", tmp_path)
    model = onnx.load(directory / "draft.onnx", load_external_data=False)
    gemm = next(node for node in model.graph.node if node.op_type == "Gemm")
    name = gemm.name
    del gemm.attribute[:]
    gemm.attribute.extend(helper.make_attribute(key, value) for key, value in change.items())
    with mapped_weights(model, directory, keep_packed=True):
        assert [node.op_type for node in model.graph.node if node.name == name] == ["Gemm"]


def test_a_gpu_gets_float_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no operators of ours."""
    monkeypatch.setattr(session_weights, "MIN_PACKED", 1)
    directory = engine("fp8", tmp_path)
    model = onnx.load(directory / "draft.onnx", load_external_data=False)
    with mapped_weights(model, directory, keep_packed=False):
        assert not any(node.op_type == PACKED_LINEAR for node in model.graph.node)


def test_weights_outside_the_directory_are_refused(tmp_path: Path) -> None:
    directory = engine("bf16", tmp_path)
    (directory / "model.safetensors").rename(tmp_path / "elsewhere")
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match=r"expected weights inside it, found model\.safetensors -> .*elsewhere"):
        graph_session(directory, "draft.onnx")


def test_a_short_file_is_said(tmp_path: Path) -> None:
    directory = engine("nvfp4", tmp_path)
    (directory / "model.safetensors").write_bytes(b"short")
    with pytest.raises(EngineError, match=r"model\.safetensors: expected \d+ bytes of .* at \d+, found a file of 5"):
        graph_session(directory, "draft.onnx")


@pytest.mark.parametrize("where", ["initializer", "attribute", "subgraph"])
def test_no_other_file_can_be_named(where: str, tmp_path: Path) -> None:
    directory = engine("bf16", tmp_path)
    (directory / "secret").write_bytes(bytes(8))
    tensor = TensorProto(name="secret", data_type=TensorProto.INT64, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=str((directory / "secret").relative_to(ROOT)))
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
    onnx.save_model(model, directory / "draft.onnx")
    with pytest.raises(EngineError, match=r"expected a weight in FLOAT, .* found secret of INT64 in .*/secret"):
        graph_session(directory, "draft.onnx")


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = engine("bf16", tmp_path)

    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(session_weights, "_in_file", no_room)
    with pytest.raises(EngineError, match=r"expected room for 0\.0 GiB of FLOAT weights .* No space left") as raised:
        graph_session(directory, "draft.onnx")
    assert "TMPDIR" in str(raised.value.hint)


def test_unpackers_refuse_other_shapes() -> None:
    codes, scales = np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match=r"expected out of shape \[2, 16\], found \[2, 32\]"):
        unpack_fp8(codes, 1.0, np.empty((2, 32), np.float32))
    with pytest.raises(ValueError, match=r"expected out of shape \[2, 32\], found \[2, 16\]"):
        unpack_nvfp4(codes, scales, 1.0, np.empty((2, 16), np.float32))
    with pytest.raises(ValueError, match=r"expected scales of shape \[2, 2\], found \[2, 1\]"):
        unpack_nvfp4(codes, scales[:, :1].copy(), 1.0, np.empty((2, 32), np.float32))
