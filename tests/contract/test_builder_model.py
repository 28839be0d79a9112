# SPDX-License-Identifier: Apache-2.0
"""Defects planted in real graphs are found by the model of TensorRT's builder; its recorder refuses unknown names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.plans import tensorrt_api
from dflash_trt.engine.plans.compile import make_monitor
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.contract.builder_model import problems
from tests.contract.plugin_creator import refusals
from tests.contract.recorder import DATA, VERSIONS, Recorder
from tests.engines import build, build_with_head
from tests.paths import FIXTURES


@pytest.fixture(params=VERSIONS)
def trt(request: pytest.FixtureRequest) -> Any:
    return Recorder(request.param)


def config(trt: Any) -> Any:
    return trt.Builder(trt.Logger(trt.Logger.WARNING)).create_builder_config()


UNKNOWN: dict[str, Callable[[Any], object]] = {
    "a function": lambda trt: trt.init_libnvinfer_plugins,
    "a class": lambda trt: trt.ImplicitBatchBuilder,
    "a method": lambda trt: config(trt).set_workspace(1),
    "an attribute that is read": lambda trt: config(trt).max_workspace_size,
    "an attribute that is written": lambda trt: setattr(config(trt), "max_workspace_size", 1),
    "an attribute that only is read": lambda trt: setattr(config(trt), "num_optimization_profiles", 1),
    "a flag": lambda trt: trt.BuilderFlag.FASTER,
    "an argument too many": lambda trt: config(trt).add_optimization_profile(1, 2),
    "an argument too few": lambda trt: config(trt).set_timing_cache(1),
    "an argument's name": lambda trt: config(trt).set_timing_cache(cache=1, ignore=True),
    "a constructor": lambda trt: trt.ICudaEngine(),
}


@pytest.mark.parametrize("use", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_names_are_refused(use: Callable[[Any], object], trt: Any) -> None:
    with pytest.raises((AttributeError, TypeError)):
        use(trt)


def test_what_only_one_version_has() -> None:
    """Precision flags went with 11, and this is how we would notice that we used one."""
    old, new = map(Recorder, VERSIONS)
    assert old.BuilderFlag.BF16 is not None  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        new.BuilderFlag.BF16  # type: ignore[attr-defined]  # noqa: B018
    assert tensorrt_api.version_of(VERSIONS[0]) == tensorrt_api.OLDEST


@pytest.mark.parametrize("version", VERSIONS)
def test_the_progress_monitor_overrides_what_tensorrt_calls(version: str) -> None:
    """TensorRT calls these by name; a monitor that lacks one would never hear of it."""
    offer = json.loads((DATA / f"tensorrt-{version}.json").read_text())["classes"]["IProgressMonitor"]["methods"]
    monitor = make_monitor(Recorder(version), progress=None)  # type: ignore[arg-type]
    for name in offer.keys() - {"__init__"}:
        assert name in vars(type(monitor))
        assert [list(inspect.signature(getattr(monitor, name)).parameters)] == offer[name]


@pytest.mark.parametrize("version", ["10.15.1.29", "11.4.0.106", "11.4", "10.16.0.post1"])
def test_versions_are_read(version: str) -> None:
    assert tensorrt_api.version_of(version) >= tensorrt_api.OLDEST


RELEASE = "10.15"
DRAFT = FIXTURES / "tiny-gpt-oss-dflash"
DFLASH2 = "tiny-qwen3-dflash2"
Engines = Callable[[str], Path]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """recipe -> the engine directory of the fixture that has it; DFLASH2, with a head of its own, has none."""
    made: dict[str, Path] = {}

    def make(recipe: str) -> Path:
        if recipe not in made:
            directory = tmp_path_factory.mktemp("engine")
            if recipe == DFLASH2:
                return made.setdefault(recipe, build_with_head(FIXTURES / DFLASH2, FIXTURES / "tiny-qwen3", directory))
            quantize_checkpoint(read_draft(DRAFT), load_recipe(recipe), directory / "checkpoint")
            build(directory / "checkpoint", directory / "engine")
            made[recipe] = directory / "engine"
        return made[recipe]

    return make


class Graph:
    """A graph that a test damages; `layers.0.mlp/Gemm_1` and its like name nodes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph

    def node(self, name: str) -> onnx.NodeProto:
        return next(node for node in self.graph.node if node.name == name)

    def initializer(self, name: str) -> onnx.TensorProto:
        return next(tensor for tensor in self.graph.initializer if tensor.name == name)

    def maker(self, value: str) -> onnx.NodeProto:
        return next(node for node in self.graph.node if value in node.output)

    def before(self, user: onnx.NodeProto, index: int, op_type: str, **attributes: object) -> onnx.NodeProto:
        """Puts a node between `user` and its input."""
        name = f"{user.name}/planted"
        node = helper.make_node(op_type, [user.input[index]], [name], name=name, **attributes)  # type: ignore[arg-type]
        place = list(self.graph.node).index(user)
        self.graph.node.insert(place, node)
        user.input[index] = name
        return self.graph.node[place]

    def bypass(self, node: onnx.NodeProto) -> None:
        """Gives the readers of a node what it reads."""
        for user in self.graph.node:
            user.input[:] = [node.input[0] if name == node.output[0] else name for name in user.input]

    def set(self, node: onnx.NodeProto, name: str, value: object) -> None:
        found = next(attribute for attribute in node.attribute if attribute.name == name)
        found.CopyFrom(helper.make_attribute(name, value))

    def external(self, name: str) -> dict[str, onnx.StringStringEntryProto]:
        return {entry.key: entry for entry in self.initializer(name).external_data}


def transposed_weights(g: Graph) -> None:
    gemm = g.node("layers.0.mlp/Gemm_1")
    g.before(gemm, 1, "Transpose", perm=[1, 0])
    g.set(gemm, "transB", 0)


def matmul_of_three_axes(g: Graph) -> None:
    """What NVIDIA's parser was given until linear layers became Gemms."""
    gemm = g.node("layers.0.self_attn/Gemm_1")
    g.before(gemm, 1, "Transpose", perm=[1, 0])
    g.bypass(g.node("layers.0.self_attn/Reshape_1"))
    gemm.op_type = "MatMul"
    del gemm.attribute[:]
    add = next(node for node in g.graph.node if gemm.output[0] in node.input)  # the bias
    user = next(node for node in g.graph.node if add.output[0] in node.input)
    g.before(user, list(user.input).index(add.output[0]), "Reshape").input.append(g.node("Reshape").input[1])


def opaque_blocks(g: Graph) -> None:
    g.bypass(g.node("layers.0.mlp/Reshape"))


def scale_dtype(g: Graph) -> None:
    scale = g.initializer(g.maker(g.node("layers.0.mlp/Gemm_1").input[1]).input[1])
    scale.CopyFrom(helper.make_tensor(scale.name, TensorProto.FLOAT, [], [1.0]))


def scale_of_zero(g: Graph) -> None:
    scale = g.initializer(g.maker(g.node("layers.0.mlp/Gemm_1").input[0]).input[1])
    scale.CopyFrom(helper.make_tensor(scale.name, TensorProto.BFLOAT16, [], [0.0]))


def block_scales_of_32(g: Graph) -> None:
    scales = g.initializer("layers.0.mlp.down_proj.weight_scale")
    scales.dims[1] //= 2


def codes_as_bytes(g: Graph) -> None:
    codes = g.initializer("layers.0.mlp.down_proj.weight")
    codes.data_type = TensorProto.UINT8


def blocked_rows(g: Graph) -> None:
    node = next(node for node in g.graph.node if node.op_type == "TRT_FP4DynamicQuantize")
    g.set(node, "axis", 0)


def implicit_cast(g: Graph) -> None:
    g.bypass(next(node for node in g.graph.node if node.op_type == "Cast" and node.name.startswith("norm/")))


def another_width(g: Graph) -> None:
    reshape = g.node("layers.0.mlp/Reshape")
    shape = g.initializer(reshape.input[1])
    shape.CopyFrom(helper.make_tensor(shape.name, TensorProto.INT64, [2], [-1, 96]))


def one_kv_head_less(g: Graph) -> None:
    node = next(node for node in g.graph.node if node.op_type == ATTENTION)
    attribute = next(a for a in node.attribute if a.name == "num_kv_heads")
    attribute.i -= 1


def layer_without_a_pointer(g: Graph) -> None:
    g.set(next(node for node in g.graph.node if node.op_type == ATTENTION), "layer", 2)


def computed_shape(g: Graph) -> None:
    reshape = g.node("layers.0.mlp/Reshape")
    g.before(reshape, 1, "Identity")


def beyond_the_file(g: Graph) -> None:
    entry = g.external("layers.0.mlp.down_proj.weight")["offset"]
    entry.value = str(int(entry.value) + 2**30)


def another_directory(g: Graph) -> None:
    g.external("layers.0.mlp.down_proj.weight")["location"].value = "../engine/model.safetensors"


def without_namespace(g: Graph) -> None:
    node = next(node for node in g.graph.node if node.op_type == ATTENTION)
    node.attribute.remove(next(a for a in node.attribute if a.name == "plugin_namespace"))


def padded_batch(g: Graph) -> None:
    pad = next(node for node in g.graph.node if node.op_type == "Pad")
    pads = g.initializer(pad.input[1])
    pads.CopyFrom(helper.make_tensor(pads.name, TensorProto.INT64, [8], [1, 0, 0, 0, 0, 0, 0, 0]))


def row_behind_the_block(g: Graph) -> None:
    end = g.initializer(next(node for node in g.graph.node if node.op_type == "Slice").input[2])
    end.CopyFrom(helper.make_tensor(end.name, TensorProto.INT64, [1], [9]))


def more_candidates_than_rows(g: Graph) -> None:
    count = g.initializer(g.node("lm_head/TopK").input[1])
    count.CopyFrom(helper.make_tensor(count.name, TensorProto.INT64, [1], [401]))


Plant = Callable[[Graph], None]
PLANTED: list[tuple[str, str, Plant, str]] = [
    ("fp8", "draft", transposed_weights, "Transpose stands between it and a multiplication"),
    ("nvfp4", "draft", transposed_weights, "Transpose stands between it and a multiplication"),
    ("fp8", "draft", matmul_of_three_axes, "a shuffle stands between it and MatMul of more than two axes"),
    ("nvfp4", "draft", opaque_blocks, "is not static to the parser"),
    ("fp8", "draft", scale_dtype, "Gemm of BF16 and FP32"),
    ("fp8", "draft", scale_of_zero, "the scale is not positive"),
    ("nvfp4", "draft", block_scales_of_32, "in blocks of 16 by scales"),
    ("nvfp4", "draft", codes_as_bytes, "UINT8, which the parser makes INT32"),
    ("nvfp4", "context", blocked_rows, "attributes {'axis': 0"),
    ("bf16", "draft", implicit_cast, "Add of BF16 and FP32"),
    ("bf16", "draft", another_width, "Reshape of "),
    ("bf16", "draft", one_kv_head_less, "input 0: expected ["),
    ("bf16", "draft", layer_without_a_pointer, "layer 2 of 2 context_pointers"),
    ("bf16", "draft", computed_shape, "input 1 is no initializer"),
    ("bf16", "draft", beyond_the_file, "are not in model.safetensors"),
    ("bf16", "draft", another_directory, "is no file beside the graph"),
    ("bf16", "draft", without_namespace, "is no operator of TensorRT 10.15's parser"),
    (DFLASH2, "draft", padded_batch, "Pad of [B, 7, "),
    (DFLASH2, "draft", row_behind_the_block, "Slice 0:9 of [B, 8, "),
    (DFLASH2, "draft", more_candidates_than_rows, "TopK 401 of [7*B, 400]"),
]


@pytest.mark.parametrize(
    ("recipe", "graph", "plant", "problem"), PLANTED, ids=[f"{p.__name__}-{recipe}" for recipe, _, p, _ in PLANTED]
)
def test_defects_are_found(
    recipe: str, graph: str, plant: Callable[[Graph], None], problem: str, engines: Engines
) -> None:
    directory = engines(recipe)
    model = onnx.load(directory / f"{graph}.onnx", load_external_data=False)
    assert problems(model, RELEASE, directory) == []
    plant(Graph(model))
    assert problem in " | ".join(problems(model, RELEASE, directory))


def attention_nodes(engine: Path) -> list[onnx.NodeProto]:
    graph = onnx.load(engine / "draft.onnx", load_external_data=False).graph
    return [node for node in graph.node if node.op_type == ATTENTION]


def test_a_planted_attribute_makes_no_plugin(engines: Engines) -> None:
    """Each by the creator's own judgement; the node that nobody touched is made."""
    pytest.importorskip("tensorrt_lean_bindings", reason="pip install -e '.[dev]' has it on Linux x86-64")

    def damaged(change: Callable[[dict[str, onnx.AttributeProto]], object]) -> onnx.NodeProto:
        node = onnx.NodeProto()
        node.CopyFrom(attention_nodes(engines("bf16"))[0])
        attributes = {attribute.name: attribute for attribute in node.attribute}
        change(attributes)
        node.attribute.remove(attributes["layer"]) if "gone" in attributes else None
        return node

    nodes = [
        damaged(lambda a: None), damaged(lambda a: a.update(gone=a["layer"])),
        damaged(lambda a: setattr(a["head_dim"], "i", 80)), damaged(lambda a: setattr(a["plugin_version"], "s", b"1")),
        damaged(lambda a: setattr(a["plugin_namespace"], "s", b"")),
        damaged(lambda a: setattr(a["causal"], "name", "is_causal")),
    ]  # fmt: skip
    assert [answer.partition(":")[0] for answer in refusals(nodes)] == [
        "", "no plugin", "no plugin", "no creator", "no creator", "no plugin",
    ]  # fmt: skip
