# SPDX-License-Identifier: Apache-2.0
"""Plans by NVIDIA's real parser and builder, of TensorRT-RTX: their layers for both graphs, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.manifest import MANIFEST, Manifest, read_manifest, sha256
from dflash_trt.engine.plans.int4_weights import UnpairedRows
from dflash_trt.engine.plans.machine import LOWEST_SM, NAMES, check_precision, sm_of
from dflash_trt.errors import BuildError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.samples import refusal
from tests.engine.plans.plan_layers import inspected_layers, num_kernels, summary, unfused
from tests.engine.plans.rtx import (
    DFLASH2,
    GOLDEN,
    HEADS,
    OWN_HEAD,
    PAIRS,
    QUICK,
    RECIPES,
    SHARED,
    SIZES,
    Engines,
    compiled,
)
from tests.engines import build
from tests.reference.synthetic import DraftSizes, write_random_draft

GRAPHS = ("context", "draft")


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize(
    ("draft", "recipe"),
    [
        pytest.param(draft, recipe, marks=() if recipe in QUICK[i * 2 :] else pytest.mark.full)
        for i, draft in enumerate(PAIRS)
        for recipe in RECIPES
    ],
)
def test_layers_are_those_that_were_counted(draft: str, recipe: str, graph: str, engines: Engines) -> None:
    """A kernel more, or weights that are multiplied as BF16, is a slower drafter.

    After a change that is meant: `python -m tests.engine.plans.rtx >tests/golden/plan_layers.json`.
    """
    engine = engines(draft, recipe)
    plan, layers = compiled(engine, graph)
    assert summary(layers) == json.loads(GOLDEN.read_text())[draft][recipe][graph]
    assert unfused(layers, engine / f"{graph}.onnx") == []
    assert len(plan) > (engine / "model.safetensors").stat().st_size // 4


@pytest.mark.parametrize("draft", HEADS)
def test_layers_of_heads_are_those_that_were_counted(draft: str, engines: Engines) -> None:
    """After the head's GEMM: the search alone, or a log-sum-exp, the search and a difference, and the correlator."""
    engine = engines(draft, OWN_HEAD)
    found = {graph: summary(compiled(engine, graph)[1]) for graph in read_manifest(engine).graphs}
    assert found == json.loads(GOLDEN.read_text())[draft][OWN_HEAD]


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name == "nvfp4" else pytest.mark.full) for name in QUICK]
)
def test_ranks_have_the_layers_of_the_whole(recipe: str, engines: Engines) -> None:
    """Between all-reduces, no kernel more."""
    engine = engines(SHARED, recipe)
    golden = json.loads(GOLDEN.read_text())
    found = {graph: summary(compiled(engine, graph)[1]) for graph in read_manifest(engine).graphs}
    assert found == golden[SHARED][recipe]
    segments = [num_kernels(layers) for graph, layers in found.items() if graph != "context"]
    assert sum(segments) == num_kernels(golden[SHARED.partition(" of ")[0]][recipe]["draft"])


@pytest.mark.full
@pytest.mark.parametrize("batch", [1, 7, 20, 32])
def test_rows_of_any_batch_are_padded_for_nvfp4(batch: int, engines: Engines) -> None:
    """8, 56, 160 and 256 rows: none of them needs a kernel more to arrange scales."""
    options = msgspec.structs.replace(SIZES, max_batch_size=batch)
    _, layers = compiled(engines("tiny-gpt-oss-dflash", "nvfp4"), "draft", options=options, profile=-1)
    found = {label: int(count) for count, label in (line.split(" ", 1) for line in summary(layers))}
    assert sum(count for label, count in found.items() if "Dyna" in label) == 8
    assert not any("ConcReshReshMove" in label for label in found)


def test_weights_that_become_bf16_are_found(engines: Engines, tmp_path: Path) -> None:
    """In nvfp4-w4a16 as it is, and where something stands between codes and multiplication."""
    engine = engines("tiny-qwen3-dflash", "nvfp4-w4a16")
    problems = unfused(compiled(engine, "draft")[1], engine / "draft.onnx")
    assert len(problems) == 12
    assert problems[0] == "layers.0.self_attn/Gemm: BF16 x computed"
    assert "W4A16_NVFP4: expected weights that TensorRT multiplies as they are" in refusal(
        lambda: check_precision(read_manifest(engine).quantization.algorithms()), BuildError
    )
    damaged = copytree(engines("tiny-gpt-oss-dflash", "fp8"), tmp_path / "engine")
    graph = Graph.read(damaged / "draft.onnx")
    graph.before(graph.node("layers.0.mlp/Gemm"), 1, "Relu")
    graph.write(damaged / "draft.onnx")
    assert len(unfused(compiled(damaged, "draft")[1], damaged / "draft.onnx")) == 1


def test_layers_of_the_engine_inspector_are_read_alike() -> None:
    """The inspector needs a GPU; its JSON has the log's fields (NVIDIA's documentation of the engine inspector)."""
    layer = {
        "Name": "a", "LayerType": "gemm", "Metadata": "[ONNX Layer: layers.0.mlp/Gemm]",
        "Inputs": [{"Name": "x", "Dimensions": [8, 128], "Format/Datatype": "Row major linear FP8 format"}],
        "Constants": [{"Name": "w", "Dimensions": [128, 512], "Format/Datatype": "Row major linear FP8 format"},
                      {"Name": "alpha", "Dimensions": [1], "Format/Datatype": "Row major linear FP32 format"}],
    }  # fmt: skip
    swizzle = layer | {"Name": "__myl_ConcReshReshMove_myl0_3", "LayerType": "kgen"}
    found = inspected_layers(json.dumps({"Layers": [layer, swizzle]}))
    assert summary(found) == ["1 GEMM FP8 x FP8", "1 kgen ConcReshReshMove"]


@pytest.mark.parametrize(
    ("recipe", "kind", "sms"), [("fp8", "FP8", ("8.0", "8.6", "8.9")), ("nvfp4", "FP4", ("8.9", "12.0"))]
)
def test_number_types_are_those_that_the_builder_finds(
    recipe: str, kind: str, sms: tuple[str, ...], engines: Engines
) -> None:
    """Our table, by which `build` refuses before the builder is asked, against the builder."""
    engine, taken = engines("tiny-qwen3-dflash", recipe), []
    for sm in sms:
        try:
            compiled(engine, "context", sm)
            taken.append(sm)
        except BuildError:
            pass
    assert taken == [sm for sm in sms if sm_of(sm) >= LOWEST_SM[kind]]
    assert 0 < len(taken) < len(sms)
    assert set(sms) <= NAMES.keys()


@pytest.mark.parametrize("graph", GRAPHS)
def test_int4_codes_are_those_of_the_checkpoint(graph: str, engines: Engines) -> None:
    """Row after row, as onnx itself unpacks the pairs of rows that the engine's file has."""
    file = engines("tiny-qwen3-dflash", "int4-w4a16") / f"{graph}.onnx"
    unpaired = UnpairedRows.read(file)
    found = {tensor.name: tensor for tensor in onnx.load_from_string(unpaired.model).graph.initializer}
    stored = [i for i in onnx.load(file).graph.initializer if i.data_type == TensorProto.INT4]
    assert {tensor.name for tensor in stored} == unpaired.weights.keys()
    for tensor in stored:
        dims, raw = found[tensor.name].dims, unpaired.weights[tensor.name].tobytes()
        rows = onnx.numpy_helper.to_array(helper.make_tensor("", TensorProto.INT4, dims, raw, raw=True))
        pairs = onnx.numpy_helper.to_array(tensor).astype(np.int8)
        np.testing.assert_array_equal(rows.astype(np.int8), pairs.swapaxes(1, 2).reshape(dims))


def test_int4_weights_with_twice_as_many_rows_as_columns(tmp_path: Path) -> None:
    """In pairs, [64, 64, 2], the builder took their blocks for those of another axis and failed."""
    sizes = DraftSizes(hidden=64, intermediate=64, head_dim=64)
    write_random_draft(tmp_path / "draft", dialect="qwen3", layer_types=["full_attention"], sizes=sizes)
    quantize_checkpoint(read_draft(tmp_path / "draft"), load_recipe("int4-w4a16"), tmp_path / "checkpoint")
    build(tmp_path / "checkpoint", tmp_path / "engine")
    _, layers = compiled(tmp_path / "engine", "draft", "8.9")
    assert summary(layers).count("4 GEMM BF16 x INT4") == 1


class Graph:
    """A graph that a test damages; `layers.0.mlp/Gemm_1` and its like name nodes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph = model.graph

    @classmethod
    def read(cls, file: Path) -> Graph:
        return cls(onnx.load(file, load_external_data=False))

    def write(self, file: Path) -> None:
        """With its hash in the manifest beside it."""
        file.write_bytes(self.model.SerializeToString())
        manifest = msgspec.json.decode((file.parent / MANIFEST).read_bytes(), type=Manifest)
        hashes = manifest.sha256 | {file.name: sha256(file)}
        (file.parent / MANIFEST).write_bytes(msgspec.structs.replace(manifest, sha256=hashes).encode())

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

    def replace(self, name: str, data_type: int, values: list[float]) -> None:
        """Gives an initializer other values; a single FLOAT or BFLOAT16 one is a scalar."""
        dims = [len(values)] if data_type == TensorProto.INT64 else []
        self.initializer(name).CopyFrom(helper.make_tensor(name, data_type, dims, values))

    def of_type(self, op_type: str) -> onnx.NodeProto:
        """First node of a type."""
        return next(node for node in self.graph.node if node.op_type == op_type)

    def attention(self) -> dict[str, onnx.AttributeProto]:
        return {attribute.name: attribute for attribute in self.of_type(ATTENTION).attribute}

    def external(self, name: str) -> dict[str, onnx.StringStringEntryProto]:
        return {entry.key: entry for entry in self.initializer(name).external_data}


def matmul_of_three_axes(g: Graph) -> None:
    """The earlier form of linear layers, before they became Gemms."""
    gemm = g.node("layers.0.self_attn/Gemm_1")
    g.before(gemm, 1, "Transpose", perm=[1, 0])
    codes = g.initializer("layers.0.self_attn.o_proj.weight")
    g.graph.initializer.append(helper.make_tensor("blocks", TensorProto.INT64, [3], [-1, 8, codes.dims[1]]))
    g.before(g.maker(gemm.input[0]), 0, "Reshape").input.append("blocks")
    gemm.op_type = "MatMul"
    del gemm.attribute[:]
    add = next(node for node in g.graph.node if gemm.output[0] in node.input)  # the bias
    user = next(node for node in g.graph.node if add.output[0] in node.input)
    g.before(user, list(user.input).index(add.output[0]), "Reshape").input.append(g.node("Reshape").input[1])


def dequantised_to_float(g: Graph) -> None:
    (attribute,) = g.maker(g.node("layers.0.mlp/Gemm_1").input[1]).attribute
    attribute.i = TensorProto.FLOAT


def scale_of_zero(g: Graph) -> None:
    g.replace(g.maker(g.node("layers.0.mlp/Gemm_1").input[0]).input[1], TensorProto.FLOAT, [0.0])


def block_scales_of_32(g: Graph) -> None:
    g.initializer("layers.0.mlp.down_proj.weight_scale").dims[1] //= 2


def codes_as_bytes(g: Graph) -> None:
    g.initializer("layers.0.mlp.down_proj.weight").data_type = TensorProto.UINT8


def blocked_rows(g: Graph) -> None:
    next(a for a in g.of_type("TRT_FP4DynamicQuantize").attribute if a.name == "axis").i = 0


def implicit_cast(g: Graph) -> None:
    g.bypass(next(node for node in g.graph.node if node.op_type == "Cast" and node.name.startswith("norm/")))


def another_width(g: Graph) -> None:
    g.replace(g.node("layers.0.mlp/Reshape").input[1], TensorProto.INT64, [-1, 96])


def one_kv_head_less(g: Graph) -> None:
    g.attention()["num_kv_heads"].i -= 1


def layer_without_a_pointer(g: Graph) -> None:
    g.attention()["layer"].i = 2


def beyond_the_file(g: Graph) -> None:
    entry = g.external("layers.0.mlp.down_proj.weight")["offset"]
    entry.value = str(int(entry.value) + 2**30)


def another_directory(g: Graph) -> None:
    g.external("layers.0.mlp.down_proj.weight")["location"].value = "../engine/model.safetensors"


def padded_batch(g: Graph) -> None:
    g.replace(g.of_type("Pad").input[1], TensorProto.INT64, [1, 0, 0, 0, 0, 0, 0, 0])


def row_behind_the_block(g: Graph) -> None:
    g.replace(g.of_type("Slice").input[2], TensorProto.INT64, [9])


def more_candidates_than_rows(g: Graph) -> None:
    g.replace(g.node("lm_head/TopK").input[1], TensorProto.INT64, [401])


def no_epsilon(g: Graph) -> None:
    g.attention()["rms_norm_eps"].name = "epsilon"


def heads_of_80(g: Graph) -> None:
    g.attention()["head_dim"].i = 80


def another_version(g: Graph) -> None:
    g.attention()["plugin_version"].s = b"1"


Plant = Callable[[Graph], None]
PLANTED: list[tuple[str, str, Plant, str]] = [
    ("fp8", "draft", dequantised_to_float, "layers.0.mlp/Gemm_1: IMatrixMultiply"),
    ("fp8", "draft", scale_of_zero, "Scale coefficients must all be positive"),
    ("nvfp4", "draft", block_scales_of_32, "importInitializers"),
    ("nvfp4", "draft", codes_as_bytes, "importInitializers"),
    ("nvfp4", "context", blocked_rows, "kv_injection/TRT_FP4DynamicQuantize"),
    ("bf16", "draft", implicit_cast, "must have same input types"),
    ("bf16", "draft", another_width, "layers.0.mlp/Gemm_1: last dimension"),
    ("bf16", "draft", one_kv_head_less, "qkv: expected shape [any, 384], found [8, 512]"),
    ("bf16", "draft", layer_without_a_pointer, "layer: expected 0 to 1, found 2"),
    ("bf16", "draft", beyond_the_file, "importInitializers"),
    ("bf16", "draft", another_directory, "importInitializers"),
    (OWN_HEAD, "draft", padded_batch, "layers.0.attention_conv/Mul_1"),
    (OWN_HEAD, "draft", row_behind_the_block, "layers.0.attention_conv/Mul_1"),
    (OWN_HEAD, "draft", more_candidates_than_rows, "built no plan"),
    ("bf16", "draft", no_epsilon, "field rms_norm_eps: expected, but not given"),
    ("bf16", "draft", heads_of_80, "field head_dim: expected 64, 96, 128 or 256, found 80"),
    ("bf16", "draft", another_version, "DFlashKVInjectionAttention"),
]


@pytest.mark.parametrize(
    ("recipe", "graph", "plant", "problem"), PLANTED, ids=[f"{p.__name__}-{recipe}" for recipe, _, p, _ in PLANTED]
)
def test_faults_are_refused(
    recipe: str, graph: str, plant: Plant, problem: str, engines: Engines, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Parser, builder or the plugin that it asks refuses it; the plugin says why on stderr."""
    source = engines(DFLASH2 if recipe == OWN_HEAD else "tiny-gpt-oss-dflash", recipe)
    engine = copytree(source, tmp_path / "engine")
    damaged = Graph.read(engine / f"{graph}.onnx")
    plant(damaged)
    damaged.write(engine / f"{graph}.onnx")
    message = refusal(lambda: compiled(engine, graph), BuildError)
    assert problem in message + capfd.readouterr().err


def test_a_multiplication_of_three_axes_costs_kernels(engines: Engines, tmp_path: Path) -> None:
    """Built, but not with the layers that were counted."""
    engine = copytree(engines("tiny-gpt-oss-dflash", "fp8"), tmp_path / "engine")
    graph = Graph.read(engine / "draft.onnx")
    matmul_of_three_axes(graph)
    graph.write(engine / "draft.onnx")
    found = summary(compiled(engine, "draft")[1])
    assert found != json.loads(GOLDEN.read_text())["tiny-gpt-oss-dflash"]["fp8"]["draft"]
