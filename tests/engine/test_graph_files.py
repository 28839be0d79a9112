# SPDX-License-Identifier: Apache-2.0
"""The ONNX files of an engine directory: valid, small, with the right signatures, and pointing at the right bytes."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from onnx.external_data_helper import uses_external_data
from safetensors.torch import load_file

from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.checkpoint.safetensors_file import StoredTensor, read_tensors
from dflash_trt.deploy.published import published_drafts
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.signatures import Port, graph_signatures
from tests.checkpoint.samples import write_target
from tests.engine.test_write import build
from tests.reference.synthetic import write_random_draft

# 8 layers, 5 taps, hidden 2880, 8 kv-heads of 64, blocks of 10.
GPT_OSS = published_drafts()["z-lab/gpt-oss-120b-DFlash"].spec


@pytest.mark.parametrize(("fp8_cache", "cached"), [(False, "BFLOAT16"), (True, "FLOAT8E4M3FN")])
def test_signatures(fp8_cache: bool, cached: str) -> None:
    graphs = graph_signatures(GPT_OSS, Quantization(modules={}, fp8_kv_cache=fp8_cache))
    found = {
        name: [(port.name, port.dtype, port.shape) for port in (*graph.inputs, *graph.outputs)]
        for name, graph in graphs.items()
    }
    assert found == {
        "context": [
            ("target_hidden", "BFLOAT16", ("T", 14400)),
            ("positions", "INT32", ("T",)),
            ("kv", cached, ("T", 2, 8, 8, 64)),
        ],
        "draft": [
            ("noise_embeds", "BFLOAT16", ("B", 10, 2880)),
            ("positions", "INT32", ("B", 10)),
            ("context_pointers", "INT64", (8, 2)),
            ("context_layout", "INT64", (6,)),
            ("page_table", "INT32", ("slots", "pages")),
            ("slot_ids", "INT32", ("B",)),
            ("context_lengths", "INT32", ("B",)),
            ("hidden", "BFLOAT16", ("B", 10, 2880)),
        ],
    }
    assert [(graph.file, len(graph.outputs)) for graph in graphs.values()] == [("context.onnx", 1), ("draft.onnx", 1)]


GRAPHS = ["context.onnx", "draft.onnx"]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@pytest.fixture(scope="module", params=["gpt_oss-bfloat16", "qwen3-float16", "qwen3-float32"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dialect, _, dtype = request.param.partition("-")
    directory = tmp_path_factory.mktemp("engine")
    draft = write_random_draft(directory / "draft", dialect=dialect, dtype=DTYPES[dtype])
    build(draft, write_target(directory / "target"), directory / "out")
    return directory / "out"


@pytest.fixture(params=GRAPHS)
def model(request: pytest.FixtureRequest, engine: Path) -> onnx.ModelProto:
    return onnx.load(engine / request.param, load_external_data=False)


def external(model: onnx.ModelProto) -> Iterator[tuple[onnx.TensorProto, dict[str, str]]]:
    for tensor in model.graph.initializer:
        if uses_external_data(tensor):
            yield tensor, {entry.key: entry.value for entry in tensor.external_data}


def test_the_checker_accepts_both(engine: Path) -> None:
    for name in GRAPHS:
        onnx.checker.check_model(str(engine / name))


def covered(engine: Path, place: dict[str, str]) -> list[StoredTensor]:
    """The tensors of model.safetensors that an initializer's bytes are made of: one, or neighbours stacked."""
    begin, length = int(place["offset"]), int(place["length"])
    tensors = sorted(read_tensors(engine / place["location"]).values(), key=lambda tensor: tensor.offset)
    inside = [tensor for tensor in tensors if begin <= tensor.offset < begin + length]
    assert inside[0].offset == begin
    assert inside[-1].offset + inside[-1].num_bytes == begin + length
    return inside


def test_external_data_is_the_safetensors_header(engine: Path, model: onnx.ModelProto) -> None:
    file_bytes = (engine / "model.safetensors").stat().st_size
    for initializer, place in external(model):
        assert place["location"] == "model.safetensors"
        assert int(place["offset"]) + int(place["length"]) <= file_bytes
        tensors = covered(engine, place)
        assert initializer.name.split("|") == [tensor.name for tensor in tensors]
        assert initializer.dims[0] == sum(tensor.shape[0] for tensor in tensors)
        assert {tuple(initializer.dims[1:])} == {tensor.shape[1:] for tensor in tensors}


def test_every_tensor_is_used_by_a_graph(engine: Path) -> None:
    models = [onnx.load(engine / name, load_external_data=False) for name in GRAPHS]
    places = [place for model in models for _, place in external(model)]
    used = {tensor.name for place in places for tensor in covered(engine, place)}
    assert used == set(read_tensors(engine / "model.safetensors"))


def test_onnx_reads_the_same_values(engine: Path, model: onnx.ModelProto) -> None:
    """onnx as an independent reader of the offsets."""
    expected = load_file(engine / "model.safetensors")
    for initializer, place in external(model):
        values = numpy_helper.to_array(initializer, base_dir=str(engine)).astype(np.float32)
        parts = [expected[tensor.name].float().numpy() for tensor in covered(engine, place)]
        assert np.array_equal(values, np.concatenate(parts))


def test_what_a_graph_stores_itself_is_small(engine: Path, model: onnx.ModelProto) -> None:
    """Rotary tables and shapes; never a weight."""
    for tensor in model.graph.initializer:
        if not uses_external_data(tensor):
            assert len(tensor.SerializeToString()) < 20_000
    assert model.ByteSize() < 150_000


def test_names_are_unique(model: onnx.ModelProto) -> None:
    nodes = Counter(node.name for node in model.graph.node)
    outputs = Counter(name for node in model.graph.node for name in node.output)
    values = {tensor.name for tensor in model.graph.initializer} | {value.name for value in model.graph.input}
    assert "" not in nodes
    assert nodes.most_common(1)[0][1] == outputs.most_common(1)[0][1] == 1
    assert not values & outputs.keys()


def test_no_constant_and_no_node_is_idle(model: onnx.ModelProto) -> None:
    read = {name for node in model.graph.node for name in node.input} | {out.name for out in model.graph.output}
    assert {tensor.name for tensor in model.graph.initializer} <= read
    assert all(set(node.output) & read for node in model.graph.node)


def test_no_functions_for_tensorrt(model: onnx.ModelProto) -> None:
    """onnx-tensorrt versions differ on whether a function or a registered plugin wins: the file has none."""
    assert not model.functions
    assert "doc_string" not in {field.name for field, _ in model.ListFields()}


def test_manifest_lists_inputs_and_outputs(engine: Path) -> None:
    manifest = read_manifest(engine)
    for graph in manifest.graphs.values():
        model = onnx.load(engine / graph.file, load_external_data=False)
        assert [_port(value) for value in model.graph.input] == list(graph.inputs)
        assert [_port(value) for value in model.graph.output] == list(graph.outputs)


def _port(value: onnx.ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    return Port(
        name=value.name,
        dtype=onnx.TensorProto.DataType.Name(tensor.elem_type),
        shape=tuple(axis.dim_param or axis.dim_value for axis in tensor.shape.dim),
    )
