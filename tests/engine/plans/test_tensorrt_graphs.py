# SPDX-License-Identifier: Apache-2.0
"""Both graphs of every recipe, feature, dialect and shard, compiled by TensorRT-RTX's real builder.

Quick tests hold what the builder does not say: which operators older parsers know, and how the plugin is found.
"""

from collections.abc import Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import msgspec
import onnx
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import DraftLayer
from dflash_trt.checkpoint.rope import Rope
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.engine.graph.draft_graph import ATTENTION, PLUGIN_VERSION
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plans.machine import NAMES, check_precision, sm_of
from dflash_trt.engine.plans.plan import PlanOptions, profiles
from dflash_trt.errors import BuildError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import FP8_KV, load_recipe
from tests.checkpoint.samples import edit_config
from tests.contract.onnx_operators import RELEASES, TYPES, importable
from tests.engine.plans.plan_layers import unfused
from tests.engine.plans.rtx import PAIRS, RECIPES, Engines, compiled
from tests.engines import build, build_with_head, fitting_target
from tests.featured import build_featured, featured_draft
from tests.paths import FIXTURES
from tests.reference.synthetic import DraftSizes, write_random_draft
from tests.runtime.test_dialects_decode import CASES, reduced_head

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


def load(engine: Path, graph: str) -> onnx.ModelProto:
    return onnx.load(engine / f"{graph}.onnx", load_external_data=False)


def served(engine: Path) -> list[str]:
    """Compute capabilities that read the engine's number formats, by our own table."""
    algorithms = read_manifest(engine).quantization.algorithms()
    return [sm for sm in NAMES if not _is_refused(algorithms, sm)]


def _is_refused(algorithms: Any, sm: str) -> bool:
    try:
        check_precision(algorithms, [sm_of(sm)])
    except BuildError:
        return True
    return False


def compile_all(engine: Path) -> None:
    """Every graph, in one plan for all GPUs that read its formats: none refused, each quantised Gemm as it is."""
    for name, graph in read_manifest(engine).graphs.items():
        options = PlanOptions(max_batch_size=2, max_seq_len=2048, max_num_tokens=16, runtime="tensorrt_rtx")
        plan, layers = compiled(engine, name, *served(engine), options=options)
        assert len(plan) > 0
        assert unfused(layers, engine / graph.file) == []


@pytest.fixture(params=PAIRS)
def draft(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["bf16", "fp8", "nvfp4"])
def engine(request: pytest.FixtureRequest, draft: str, engines: Engines) -> Path:
    return engines(draft, request.param)


@pytest.mark.full
@pytest.mark.parametrize("cache", ["", FP8_KV])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe: str, cache: str, draft: str, engines: Engines) -> None:
    compile_all(engines(draft, recipe + cache))


@pytest.mark.full
@pytest.mark.parametrize("sm", NAMES)
def test_every_gpu_alone(sm: str, engines: Engines) -> None:
    for recipe in RECIPES:
        engine = engines("tiny-qwen3-dflash", recipe)
        if sm in served(engine):
            assert len(compiled(engine, "draft", sm)[0]) > 0


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature(feature: str, recipe: str, tmp_path: Path) -> None:
    tensors = reduced_head()[0] if feature == "reduced head" else {}
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", tmp_path / "draft", FEATURES[feature], tensors)
    build_engine(
        BuildOptions(
            draft=draft, draft_name="draft", target=fitting_target(draft), output=tmp_path / "engine",
            recipe=load_recipe(recipe),
        )
    )  # fmt: skip
    compile_all(tmp_path / "engine")


@pytest.mark.full
@pytest.mark.parametrize("dialect", CASES)
def test_context_graphs_of_every_dialect(dialect: str, tmp_path: Path) -> None:
    """Their samples have heads of 16, which the plugin does not take: their draft graphs are the features' above."""
    build(CASES[dialect].write(tmp_path / "draft"), tmp_path / "engine")
    assert len(compiled(tmp_path / "engine", "context", *NAMES)[0]) > 0
    with pytest.raises(BuildError):
        compiled(tmp_path / "engine", "draft")


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_every_head_dim(head_dim: int, recipe: str, tmp_path: Path) -> None:
    sizes = DraftSizes(head_dim=head_dim, hidden=64, num_heads=4)
    source = write_random_draft(tmp_path / "draft", dialect="gpt_oss", sizes=sizes)
    quantize_checkpoint(read_draft(source), load_recipe(recipe), tmp_path / "quantised")
    build(tmp_path / "quantised", tmp_path / "engine")
    compile_all(tmp_path / "engine")


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
def test_shards(recipe: str, tmp_path: Path) -> None:
    quantize_checkpoint(read_draft(FIXTURES / "tiny-gpt-oss-dflash"), load_recipe(recipe), tmp_path / "checkpoint")
    draft = read_draft(tmp_path / "checkpoint")
    options = {"draft": draft, "draft_name": "draft", "target": fitting_target(draft), "num_ranks": 2}
    build_engine(BuildOptions(output=tmp_path / "engine", **options))
    compile_all(tmp_path / "engine" / "rank1")


@pytest.mark.full
def test_convolutions_and_selector(tmp_path: Path) -> None:
    """With a head of the draft's own that multiplies and caps its logits."""
    draft = edit_config(
        copytree(FIXTURES / "tiny-qwen3-dflash2", tmp_path / "source"),
        dflash_config__output_multiplier=0.5, dflash_config__final_logit_softcapping=20.0,
    )  # fmt: skip
    engine = build_with_head(draft, FIXTURES / "tiny-qwen3", tmp_path)
    assert {"Tanh", "TopK", "Pad"} <= {node.op_type for node in load(engine, "draft").graph.node}
    compile_all(engine)


@pytest.mark.full
@pytest.mark.parametrize("markov", ["none", "vanilla", "gated"])
def test_blocks_that_propose_from_the_anchor(markov: Any, tmp_path: Path) -> None:
    """With DSpark's own head, all of whose rows propose candidates."""
    sizes = DraftSizes(head_dim=64)
    draft = write_random_draft(tmp_path / "draft", dialect="qwen3", dspark=markov, own_vocabulary=True, sizes=sizes)
    build(draft, tmp_path / "engine")
    compile_all(tmp_path / "engine")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "convolved"])
def test_lilicorrs_context_rows_and_log_probabilities(kind: Any, tmp_path: Path) -> None:
    """The context graph's second output, and a head of the draft's own whose candidates have log probabilities."""
    sizes = DraftSizes(head_dim=64)
    draft = write_random_draft(tmp_path / "draft", dialect="qwen3", lilicorr=kind, own_vocabulary=True, sizes=sizes)
    build(draft, tmp_path / "engine")
    assert "ReduceLogSumExp" in {node.op_type for node in load(tmp_path / "engine", "draft").graph.node}
    assert [output.name for output in load(tmp_path / "engine", "context").graph.output] == ["kv", "context_hidden"]
    compile_all(tmp_path / "engine")


def test_windows_and_causality_reach_the_plugin_layer_by_layer(tmp_path: Path) -> None:
    """Sinks are its tenth input; the real creator takes each node."""
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", tmp_path / "draft", {"layers": LAYERS})
    build_featured(draft, tmp_path / "engine")
    nodes = [node for node in load(tmp_path / "engine", "draft").graph.node if node.op_type == ATTENTION]
    attributes = [{a.name: a.i for a in node.attribute} for node in nodes]
    found = [
        (a["sliding_window"] or None, bool(a["causal"]), len(n.input) == 10)
        for a, n in zip(attributes, nodes, strict=True)
    ]
    assert found == [msgspec.structs.astuple(layer) for layer in LAYERS]
    _, layers = compiled(tmp_path / "engine", "draft")
    assert [layer.label for layer in layers].count("attention") == len(LAYERS)


def op_types(engine: Path) -> Iterator[str]:
    for name in ("context", "draft"):
        yield from (node.op_type for node in load(engine, name).graph.node if node.op_type != ATTENTION)


@pytest.mark.parametrize("feature", FEATURES)
def test_operators_are_those_of_the_oldest_parser(feature: str, tmp_path: Path) -> None:
    """TensorRT-RTX's parser is newer than that of TensorRT 10.15, which needs a GPU."""
    tensors = reduced_head()[0] if feature == "reduced head" else {}
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", tmp_path / "draft", FEATURES[feature], tensors)
    build_featured(draft, tmp_path / "engine")
    assert {name for name in op_types(tmp_path / "engine") if not importable(name, RELEASES[0])} == set()
    assert not importable("Swish", RELEASES[0])


def test_operators_of_recipes_are_those_of_the_oldest_parser(engine: Path) -> None:
    assert {name for name in op_types(engine) if not importable(name, RELEASES[0])} == set()


def test_the_plugin_is_asked_for_by_namespace(engine: Path) -> None:
    """A node with plugin_namespace reaches the plugin; without, the parser would take the op_type's importer."""
    for node in load(engine, "draft").graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        assert (node.op_type == ATTENTION) == ("plugin_namespace" in attributes)
        if node.op_type == ATTENTION:
            assert attributes["plugin_namespace"].s == b"dflash_trt"
            assert attributes["plugin_version"].s == PLUGIN_VERSION.encode()
    assert ATTENTION not in TYPES


def test_nothing_is_copied_between_the_gemm_and_the_plugin(engine: Path) -> None:
    """q, k and v leave one GEMM as the plugin takes them, which adds their biases where the GEMM does not."""
    graph = load(engine, "draft").graph
    makers = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        if node.op_type == ATTENTION:
            is_biased, between = next(a.i for a in node.attribute if a.name == "has_qkv_bias"), []
            while (node := makers[node.input[0]]).op_type not in ("Gemm", "MatMul"):
                between.append(node.op_type)
            assert between in (([],) if is_biased else ([], ["Add"]))


def test_the_context_graph_needs_no_plugin(engine: Path) -> None:
    """A plan without attention is built and loaded without the library."""
    assert [name for name, graph in read_manifest(engine).graphs.items() if graph.reads_context] == ["draft"]
    assert not any(node.domain == "dflash_trt" for node in load(engine, "context").graph.node)


def test_dynamic_axes_are_those_of_the_profiles(engine: Path) -> None:
    manifest = read_manifest(engine)
    for name, graph in manifest.graphs.items():
        axes = {axis for port in (*graph.inputs, *graph.outputs) for axis in port.shape if isinstance(axis, str)}
        for profile in profiles(name, PlanOptions()):
            assert axes == profile.keys()
