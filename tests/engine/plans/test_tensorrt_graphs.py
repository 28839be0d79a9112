# SPDX-License-Identifier: Apache-2.0
"""What TensorRT's parser asks of both graphs, for every recipe, fixture and feature, without TensorRT."""

from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import DraftLayer
from dflash_trt.checkpoint.rope import Rope
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plans.plan import PlanOptions, profiles
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.samples import edit_config
from tests.contract.builder_model import problems
from tests.contract.onnx_operators import RELEASES, TYPES
from tests.contract.plugin_creator import refusals
from tests.contract.strong_typing import Checker
from tests.engines import build, build_with_head, fitting_target
from tests.featured import build_featured, featured_draft
from tests.paths import FIXTURES, REPOSITORY
from tests.reference.synthetic import write_random_draft
from tests.runtime.test_dialects_decode import reduced_head

LAYERS = tuple(
    DraftLayer(sliding_window=window, causal=causal, sinks=sinks)
    for window, causal, sinks in ((4, True, True), (None, False, False), (7, False, True))
)
FEATURES: dict[str, dict[str, Any]] = {
    "own head": {"draft_vocab_size": 1024, "own_embedding": True},
    "reduced head": {"draft_vocab_size": 300},
    "Laguna": {"tap_norms": True, "context_input_layernorm": True, "attention_gate": "per_head"},
    "MiMo": {"layers": LAYERS, "value_scale": 0.707, "biases": ("q_proj", "v_proj", "fc"), "mask_embedding": True},
    "gate an element": {"attention_gate": "per_element"},
    "partial rotary": {"rope": Rope(theta=1e4, scaling=None, partial_rotary_factor=0.5)},
    "interleaved rotary": {"rope": Rope(theta=1e4, scaling=None, interleaved=True)},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_builder_takes_it(feature: str, tmp_path: Path) -> None:
    tensors = reduced_head()[0] if feature == "reduced head" else {}
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", tmp_path / "draft", FEATURES[feature], tensors)
    build_featured(draft, tmp_path / "engine")
    for name in ("context", "draft"):
        model = onnx.load(tmp_path / "engine" / f"{name}.onnx", load_external_data=False)
        for release in RELEASES:
            assert problems(model, release, tmp_path / "engine") == []


def test_windows_and_causality_reach_the_plugin_layer_by_layer(tmp_path: Path) -> None:
    """By the real creator; sinks are its tenth input."""
    pytest.importorskip("tensorrt_lean_bindings", reason="pip install -e '.[dev]' has it on Linux x86-64")
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", tmp_path / "draft", {"layers": LAYERS})
    build_featured(draft, tmp_path / "engine")
    model = onnx.load(tmp_path / "engine" / "draft.onnx", load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == ATTENTION]
    assert refusals(nodes) == [""] * 3
    attributes = [{a.name: a.i for a in node.attribute} for node in nodes]
    found = [
        (a["sliding_window"] or None, bool(a["causal"]), len(n.input) == 10)
        for a, n in zip(attributes, nodes, strict=True)
    ]
    assert found == [msgspec.structs.astuple(layer) for layer in LAYERS]


RECIPES = sorted(file.stem for file in (REPOSITORY / "build_configs" / "recipes").glob("*.yaml"))
PAIRS = {"tiny-gpt-oss-dflash": "tiny-gpt-oss", "tiny-qwen3-dflash": "tiny-qwen3"}
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
@pytest.mark.parametrize("graph", ["context", "draft"])
def test_graphs_are_ones_that_the_builder_can_fuse(graph: str, release: str, engine: Path) -> None:
    assert problems(load(engine, graph), release, engine) == []


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
def test_shards_are_ones_that_the_builder_can_fuse(recipe: str, release: str, tmp_path: Path) -> None:
    quantize_checkpoint(read_draft(FIXTURES / "tiny-gpt-oss-dflash"), load_recipe(recipe), tmp_path / "checkpoint")
    draft = read_draft(tmp_path / "checkpoint")
    options = {"draft": draft, "draft_name": "draft", "target": fitting_target(draft), "num_ranks": 2}
    build_engine(BuildOptions(output=tmp_path / "engine", **options))
    shard = tmp_path / "engine" / "rank1"
    for name in read_manifest(shard).graphs:
        assert problems(load(shard, name), release, shard) == [], name


@pytest.mark.parametrize("release", RELEASES)
def test_convolutions_and_selector_are_ones_that_the_builder_can_fuse(release: str, tmp_path: Path) -> None:
    """With a head of the draft's own that multiplies and caps its logits."""
    draft = edit_config(
        copytree(FIXTURES / "tiny-qwen3-dflash2", tmp_path / "source"),
        dflash_config__output_multiplier=0.5, dflash_config__final_logit_softcapping=20.0,
    )  # fmt: skip
    engine = build_with_head(draft, FIXTURES / "tiny-qwen3", tmp_path)
    assert {"Tanh", "TopK", "Pad"} <= {node.op_type for node in load(engine, "draft").graph.node}
    assert problems(load(engine, "draft"), release, engine) == []


@pytest.mark.parametrize("release", RELEASES)
def test_blocks_that_propose_from_the_anchor_are_ones_that_the_builder_can_fuse(release: str, tmp_path: Path) -> None:
    """With DSpark's own head, all of whose rows propose candidates."""
    draft = write_random_draft(tmp_path / "draft", dialect="qwen3", dspark="gated", own_vocabulary=True)
    build(draft, tmp_path / "engine")
    graph = load(tmp_path / "engine", "draft")
    sizes = {
        output.name: [axis.dim_value for axis in output.type.tensor_type.shape.dim][1:] for output in graph.graph.output
    }
    assert sizes == {"hidden": [6, 48], "candidate_ids": [6, 32], "candidate_logits": [6, 32]}
    assert problems(graph, release, tmp_path / "engine") == []


def test_the_plugin_is_asked_for_by_namespace(engine: Path) -> None:
    """A node with plugin_namespace reaches the plugin; without, the parser would take the op_type's importer."""
    for node in load(engine, "draft").graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        assert (node.op_type == ATTENTION) == ("plugin_namespace" in attributes)
        if node.op_type == ATTENTION:
            assert attributes["plugin_namespace"].s == b"dflash_trt"
            assert attributes["plugin_version"].s == b"3"
    assert ATTENTION not in TYPES


def test_nothing_is_copied_between_the_gemm_and_the_plugin(engine: Path) -> None:
    """q, k and v leave one GEMM as the plugin takes them: with their biases, under another shape."""
    graph = load(engine, "draft").graph
    makers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        if node.op_type == ATTENTION:
            between = []
            while (node := makers[node.input[0]]).op_type != "Gemm":
                between.append(node.op_type)
            assert between in (["Reshape"], ["Reshape", "Add"])


def test_every_plugin_node_makes_a_plugin(engine: Path) -> None:
    """By the real creator, of each node's attributes, and of no others."""
    pytest.importorskip("tensorrt_lean_bindings", reason="pip install -e '.[dev]' has it on Linux x86-64")
    nodes = [node for node in load(engine, "draft").graph.node if node.op_type == ATTENTION]
    assert refusals(nodes) == [""] * len(read_manifest(engine).draft.layers)


def test_the_context_graph_needs_no_plugin(engine: Path) -> None:
    """A plan without attention is built and loaded without the library."""
    assert [name for name, graph in read_manifest(engine).graphs.items() if graph.reads_context] == ["draft"]
    assert not any(node.domain == "dflash_trt" for node in load(engine, "context").graph.node)


def test_no_initializer_is_uint8_and_fp4_ones_are_even(engine: Path) -> None:
    for model in models(engine):
        for tensor in model.graph.initializer:
            assert tensor.data_type != TensorProto.UINT8
            if tensor.data_type == TensorProto.FLOAT4E2M1:
                assert tensor.dims[-1] % 16 == 0, tensor.name


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
