# SPDX-License-Identifier: Apache-2.0
"""What TensorRT's parser asks of both graphs, checked for every recipe and fixture without TensorRT."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from dflash_trt.builder.tensorrt.profiles import profiles
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plan import PLUGIN_GRAPH, PlanOptions
from dflash_trt.engine.plugin_library import installed_library
from dflash_trt.graph.draft_graph import ATTENTION
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.contract.onnx_operators import RELEASES, TYPES
from tests.contract.strong_typing import Checker
from tests.engines import build
from tests.paths import FIXTURES, REPOSITORY

RECIPES = sorted(file.stem for file in (REPOSITORY / "build_configs" / "recipes").glob("*.yaml"))
PAIRS = {"tiny-gpt-oss-dflash": "tiny-gpt-oss", "tiny-qwen3-dflash": "tiny-qwen3"}
BITS = {TensorProto.FLOAT4E2M1: 4, TensorProto.FLOAT8E4M3FN: 8, TensorProto.BFLOAT16: 16, TensorProto.FLOAT: 32}
Engines = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """(draft, recipe) -> its engine directory."""
    made: dict[tuple[str, str], Path] = {}

    def make(draft: str, recipe: str) -> Path:
        if (draft, recipe) not in made:
            directory = tmp_path_factory.mktemp("engine")
            quantize_checkpoint(read_draft(FIXTURES / draft), load_recipe(recipe), directory / "checkpoint")
            build(directory / "checkpoint", directory / "engine", FIXTURES / PAIRS[draft])
            made[draft, recipe] = directory / "engine"
        return made[draft, recipe]

    return make


@pytest.fixture(params=PAIRS)
def draft(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[recipe + cache for recipe in RECIPES for cache in ("", "+fp8-kv")])
def engine(request: pytest.FixtureRequest, draft: str, engines: Engines) -> Path:
    return engines(draft, request.param)


def load(engine: Path, graph: str) -> onnx.ModelProto:
    return onnx.load(engine / f"{graph}.onnx", load_external_data=False)


def models(engine: Path) -> Iterator[onnx.ModelProto]:
    yield from (load(engine, graph) for graph in ("context", "draft"))


@pytest.mark.parametrize("release", RELEASES)
def test_the_draft_graph_parses_strongly_typed(release: str, engine: Path) -> None:
    assert list(Checker(load(engine, "draft"), release).problems()) == []


@pytest.mark.parametrize("release", RELEASES)
def test_the_context_graph_parses_strongly_typed(release: str, engine: Path) -> None:
    assert list(Checker(load(engine, "context"), release).problems()) == []


def test_the_plugin_is_asked_for_by_namespace(engine: Path) -> None:
    """A node with plugin_namespace reaches the plugin; without, the parser would take the op_type's importer."""
    for node in load(engine, "draft").graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        assert (node.op_type == ATTENTION) == ("plugin_namespace" in attributes)
        if node.op_type == ATTENTION:
            assert attributes["plugin_namespace"].s == b"dflash_trt"
            assert attributes["plugin_version"].s == b"1"
    assert ATTENTION not in TYPES


@pytest.fixture(scope="module")
def listed() -> set[str]:
    """The attributes that the plugin's creator lists, asked of TensorRT's registry; in a process that may crash."""
    pytest.importorskip("tensorrt_lean_bindings", reason="pip install -e '.[dev]' has it on Linux x86-64")
    program = """
import os, sys
import tensorrt_lean_bindings as trt
registry = trt.get_plugin_registry()
registry.load_library(sys.argv[1])
creator = registry.get_creator("DFlashKVInjectionAttention", "1", "dflash_trt")
print(*(field.name for field in creator.field_names), flush=True)
os._exit(0)  # before the library's objects are taken apart
"""
    command = [sys.executable, "-c", program, str(installed_library())]
    return set(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split())


def test_attributes_are_those_that_the_creator_lists(engine: Path, listed: set[str]) -> None:
    """The parser passes no others on, and the creator asks for each."""
    for node in load(engine, "draft").graph.node:
        if node.op_type == ATTENTION:
            names = {attribute.name for attribute in node.attribute} - {"plugin_namespace", "plugin_version"}
            assert names == listed


def test_the_context_graph_needs_no_plugin(engine: Path) -> None:
    """Its plan is built and loaded without the library."""
    assert PLUGIN_GRAPH == "draft"
    assert not any(node.domain == "dflash_trt" for node in load(engine, "context").graph.node)


def test_no_initializer_is_uint8_and_fp4_ones_are_even(engine: Path) -> None:
    for model in models(engine):
        for tensor in model.graph.initializer:
            assert tensor.data_type != TensorProto.UINT8
            if tensor.data_type == TensorProto.FLOAT4E2M1:
                assert tensor.dims[-1] % 16 == 0, tensor.name


def test_external_data_lies_within_its_file(engine: Path) -> None:
    for model in models(engine):
        for tensor in filter(uses_external_data, model.graph.initializer):
            place = {entry.key: entry.value for entry in tensor.external_data}
            length = int(place["length"])
            assert length * 8 == int(np.prod(tensor.dims)) * BITS[tensor.data_type]
            assert Path(place["location"]).name == place["location"]
            assert int(place["offset"]) + length <= (engine / place["location"]).stat().st_size


def test_dynamic_axes_are_those_of_the_profiles(engine: Path) -> None:
    manifest = read_manifest(engine)
    for name, graph in manifest.graphs.items():
        axes = {axis for port in (*graph.inputs, *graph.outputs) for axis in port.shape if isinstance(axis, str)}
        for profile in profiles(name, PlanOptions()):
            assert axes == profile.keys()


def graph_of(*nodes: onnx.NodeProto, opset: int = 23, **tensors: int) -> onnx.ModelProto:
    """A graph of FLOAT, BFLOAT16, ... inputs by name; values called c_* are constants 1."""
    inputs = [helper.make_tensor_value_info(name, dtype, [4]) for name, dtype in tensors.items()]
    constants = {name for node in nodes for name in node.input if name.startswith("c_")}
    graph = helper.make_graph(
        list(nodes), "g", inputs, [], [numpy_helper.from_array(np.ones((), np.float32), name) for name in constants]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (graph_of(helper.make_node("Add", ["a", "b"], ["y"]), a=1, b=TensorProto.BFLOAT16), "Add of FP32 and BF16"),
        (graph_of(helper.make_node("CumProd", ["a"], ["y"]), a=1), "CumProd is no operator"),
        (graph_of(helper.make_node("Swish", ["a"], ["y"]), a=1), "Swish is no operator"),
        (graph_of(helper.make_node("Sqrt", ["a"], ["y"]), a=TensorProto.INT32), "Sqrt does not take INT32"),
        (graph_of(helper.make_node("Reshape", ["a", "b"], ["y"]), a=1, b=7), "input 1 is no initializer"),
        (graph_of(helper.make_node("Identity", ["a"], ["y"]), opset=25, a=1), "opset 25 is outside 9 to 24"),
        (graph_of(helper.make_node("DequantizeLinear", ["a", "c_s"], ["y"]), opset=22, a=TensorProto.FLOAT4E2M1),
         "FP4 is not of opset 22"),
        (graph_of(helper.make_node("TRT_FP4DynamicQuantize", ["a", "c_s"], ["y", "s"], axis=1), a=1), "attributes"),
        (graph_of(helper.make_node("QuantizeLinear", ["a", "b", "c_z"], ["y"]), a=1, b=1), "no positive constant"),
    ],
)  # fmt: skip
def test_the_check_finds(model: onnx.ModelProto, problem: str) -> None:
    assert problem in " | ".join(Checker(model, "10.15").problems())
