# SPDX-License-Identifier: Apache-2.0
"""Quantised graphs against the float64 equations on dequantised weights, and what they lose."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import safetensors.torch
from safetensors.numpy import save_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.quantization import read_scale
from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.graph.layers import leave_out_padding
from dflash_trt.quantize.bounds import Ranges
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.onnxruntime import lowering, packed_linear
from tests.engines import Graphs, build
from tests.paths import FIXTURES
from tests.quantize.samples import arrays, dequantised
from tests.reference.dflash_float64 import ReferenceDrafter
from tests.runtime.drafter.onnxruntime.test_packed_weights import dynamic_nvfp4

DRAFTS = ("tiny-gpt-oss-dflash", "tiny-qwen3-dflash")
Quantized = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    """(fixture, recipe) -> the quantised checkpoint and the engine directory built from it."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(draft: str, recipe: str) -> tuple[Path, Path]:
        if (draft, recipe) not in made:
            directory = tmp_path_factory.mktemp(recipe)
            quantize_checkpoint(read_draft(FIXTURES / draft), load_recipe(recipe), directory / "checkpoint")
            build(directory / "checkpoint", directory / "engine")
            made[draft, recipe] = directory / "checkpoint", directory / "engine"
        return made[draft, recipe]

    return make


def dequantized(checkpoint: Path, output: Path) -> Path:
    """A FLOAT checkpoint of the values that quantised tensors stand for, by their definition."""
    tensors = arrays(checkpoint)
    for module in read_draft(checkpoint).quantization.modules:
        tensors[f"{module}.weight"] = dequantised(tensors, module)
    output.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("quantization_config", None)
    (output / "config.json").write_text(json.dumps(config))
    kept = {name: values for name, values in tensors.items() if not name.endswith(("_scale", "_scale_2"))}
    save_file({name: values.astype(np.float32) for name, values in kept.items()}, output / "model.safetensors")
    return output


LENGTH = 40


def inputs(spec: DraftSpec, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Random taps [LENGTH, A*H] and noise [S, H]."""
    rng = np.random.default_rng(seed)
    shapes = (LENGTH, spec.target_hidden_size), (spec.block_size, spec.hidden_size)
    taps, noise = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return taps, noise


def equations(reference: ReferenceDrafter, spec: DraftSpec, seed: int = 3) -> list[np.ndarray]:
    """k, v and hidden of the reference."""
    taps, noise = inputs(spec, seed)
    k, v = reference.context_kv(taps.astype(np.float64), np.arange(LENGTH))
    return [k, v, reference.draft(noise.astype(np.float64), k, v, np.arange(LENGTH, LENGTH + spec.block_size))]


def run(engine: Path, reference: ReferenceDrafter, seed: int = 3) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """k, v and hidden of the graphs, and of the reference; both draft on the reference's context."""
    graphs = Graphs(engine)
    taps, noise = inputs(graphs.spec, seed)
    k, v, expected = equations(reference, graphs.spec, seed)
    caches = tuple(rows.swapaxes(0, 1)[None].astype(np.float32) for rows in (k, v))
    hidden = graphs.draft(noise[None], (caches[0], caches[1]), [0], [LENGTH])[0]
    return [*graphs.context(taps, np.arange(LENGTH)), hidden], [k, v, expected]


def assert_exact(engine: Path, reference: ReferenceDrafter) -> None:
    for actual, expected in zip(*run(engine, reference), strict=True):
        assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


def gemm_counts(engine: Path) -> dict[str, int]:
    graphs = {name: onnx.load(engine / f"{name}.onnx", load_external_data=False).graph for name in ("context", "draft")}
    products = ("Gemm", "MatMul")
    return {name: sum(node.op_type in products for node in graph.node) for name, graph in graphs.items()}


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("recipe", ["nvfp4-w4a16", "int4-w4a16"])
def test_quantised_weights_are_exact(quantized: Quantized, draft: str, recipe: str, tmp_path: Path) -> None:
    """Weight-only: nothing but the weights differs, so the graphs equal the equations on dequantised weights."""
    checkpoint, engine = quantized(draft, recipe)
    reference = ReferenceDrafter.load(dequantized(checkpoint, tmp_path / "dense"))
    assert_exact(engine, reference)


@pytest.mark.parametrize("min_packed", [1, 512])
def test_int4_scales_are_read_as_bfloat16(
    quantized: Quantized, min_packed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales that modelopt wrote have all bits of FLOAT; TensorRT multiplies with the nearest BFLOAT16."""
    monkeypatch.setattr(packed_linear, "MIN_PACKED", min_packed)
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(quantized("tiny-qwen3-dflash", "int4-w4a16")[0], checkpoint)
    scale = "layers.1.mlp.down_proj.weight_scale"
    tensors = safetensors.torch.load_file(checkpoint / "model.safetensors")
    tensors[scale] *= 1.0021
    assert (tensors[scale] / tensors[scale].bfloat16().float() - 1).abs().mean() > 1e-3
    safetensors.torch.save_file(tensors, checkpoint / "model.safetensors")
    build(checkpoint, tmp_path / "engine")
    reference = ReferenceDrafter.load(dequantized(checkpoint, tmp_path / "dense"))
    assert_exact(tmp_path / "engine", reference)


def with_quantized_inputs(reference: ReferenceDrafter, checkpoint: Path) -> ReferenceDrafter:
    """The equations with every linear layer's input rounded as its algorithm says, by definition."""
    draft = read_draft(checkpoint)
    layers = range(len(draft.spec.layers))

    def scale(modules: list[str]) -> np.float32:
        return np.float32(max(read_scale(draft.weights[f"{module}.input_scale"]) for module in modules))

    class Quantizing(ReferenceDrafter):
        def context_kv(self, target_hidden: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            together = [f"layers.{layer}.self_attn.{x}_proj" for layer in layers for x in "kv"]
            sharing.append(together)
            try:
                return super().context_kv(target_hidden, positions)
            finally:
                sharing.remove(together)

        def linear(self, name: str, x: np.ndarray) -> np.ndarray:
            algorithm = draft.quantization.modules.get(name)
            if algorithm is None:
                return super().linear(name, x)
            layer, _, projection = name.rpartition(".")
            alike = next((group for group in GROUPS if projection in group), [projection])
            modules = [f"{layer}.{other}".lstrip(".") for other in alike]
            widest = scale(next((group for group in sharing if name in group), modules))
            return super().linear(name, rounded(x.astype(np.float32), widest, algorithm).astype(np.float64))

    sharing: list[list[str]] = []
    return Quantizing(**{name: getattr(reference, name) for name in reference.__dataclass_fields__})


GROUPS = (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"])  # readers of one activation


def rounded(x: np.ndarray, scale: np.float32, algorithm: str) -> np.ndarray:
    if algorithm == "NVFP4":
        return dynamic_nvfp4(x, scale)
    assert algorithm == "FP8"
    return np.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "mixed-nvfp4-fp8", "nvfp4-native"])
def test_quantised_activations_are_rounded_once(quantized: Quantized, draft: str, recipe: str, tmp_path: Path) -> None:
    """Matches the equations with rounded inputs for two of three inputs.

    A value at a rounding boundary may fall to either side of it, as a CPU's kernels add up, and an early one moves all
    that later layers round.
    """
    checkpoint, engine = quantized(draft, recipe)
    exact = ReferenceDrafter.load(dequantized(checkpoint, tmp_path / "dense"))
    runs = [run(engine, with_quantized_inputs(exact, checkpoint), seed) for seed in (3, 4, 5)]
    errors = [[relative_error(*pair) for pair in zip(*outputs, strict=True)] for outputs in runs]
    assert (np.median(errors, axis=0) < 1e-3).all()  # 1e-5 with a few values on the other side, 1e-7 without
    expected = runs[0][1]
    assert (
        relative_error(expected[2], equations(exact, read_draft(checkpoint).spec)[2]) > 0.05
    )  # rounding is no small matter


@pytest.mark.parametrize("draft", DRAFTS)
def test_an_fp8_cache_rounds_context_rows_to_fp8(quantized: Quantized, draft: str) -> None:
    """The rows of +fp8-kv are those without it, each a multiple of its layer's scale in E4M3."""
    plain, (checkpoint, engine) = quantized(draft, "nvfp4-w4a16")[1], quantized(draft, "nvfp4-w4a16+fp8-kv")
    graphs, wide = Graphs(engine), Graphs(plain)
    taps = np.random.default_rng(0).standard_normal((9, graphs.spec.target_hidden_size)).astype(np.float32)
    scales = read_draft(checkpoint)
    for kv, name in enumerate("kv"):
        rows, exact = graphs.context(taps, np.arange(9))[kv], wide.context(taps, np.arange(9))[kv]
        for layer, stored in enumerate(scales.cache_scales(name)):
            scale = np.float32(stored)
            codes = (exact[:, layer] / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            np.testing.assert_array_equal(rows[:, layer], codes * scale)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "nvfp4-w4a16", "int4-w4a16"])
def test_one_gemm_for_all_context_rows(quantized: Quantized, draft: str, recipe: str) -> None:
    """fc and K/V: two GEMMs whatever the number of layers; the draft graph has four a layer."""
    _, engine = quantized(draft, recipe)
    assert gemm_counts(engine) == {"context": 2, "draft": 4 * len(read_draft(engine).spec.layers)}


def rescale(checkpoint: Path, tensor: str, factor: float) -> None:
    """Multiplies a scalar FLOAT tensor of a checkpoint, in place."""
    scale = read_draft(checkpoint).weights[tensor]
    raw = bytearray(scale.file.read_bytes())
    value = np.frombuffer(raw, np.float32, 1, scale.offset)[0] * np.float32(factor)
    raw[scale.offset : scale.offset + 4] = value.tobytes()
    scale.file.write_bytes(raw)


def attribute(node: onnx.NodeProto, name: str) -> float:
    return next(attribute.f for attribute in node.attribute if attribute.name == name)


def test_one_activation_scale_covers_all_that_read_it(quantized: Quantized, tmp_path: Path) -> None:
    """q, k and v read one quantised activation: at the widest of their ranges, so that none is clipped."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(quantized("tiny-gpt-oss-dflash", "nvfp4")[0], checkpoint)
    rescale(checkpoint, "layers.0.self_attn.q_proj.input_scale", 0.25)
    build(checkpoint, tmp_path / "engine")
    graph = onnx.load(tmp_path / "engine" / "draft.onnx", load_external_data=False).graph
    constants = {i.name: i for i in graph.initializer}
    node = next(node for node in graph.node if node.op_type == "TRT_FP4DynamicQuantize")
    assert node.input[0] == "layers.0.self_attn.q_proj/input"
    weights = read_draft(checkpoint).weights
    scales = [read_scale(weights[f"layers.0.self_attn.{x}_proj.input_scale"]) for x in "qkv"]
    assert scales[0] < scales[1]
    assert onnx.numpy_helper.to_array(constants[node.input[1]]) == np.float32(max(scales))


@pytest.mark.parametrize("name", ["tiny-gpt-oss-dflash", "tiny-qwen3-dflash2"])
def test_rows_of_padding_change_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime, which leaves them out, computes the same with them: a DFlash2 draft's are whole blocks."""
    draft = read_draft(FIXTURES / name)
    L, modules = draft.spec.num_layers, draft.spec.linear_modules()
    ranges = Ranges(inputs=dict.fromkeys(modules, 20.0), k=(9.0,) * L, v=(9.0,) * L)
    quantize_checkpoint(draft, load_recipe("nvfp4"), tmp_path / "checkpoint", ranges=ranges)
    build(tmp_path / "checkpoint", tmp_path / "engine")
    rng, spec = np.random.default_rng(4), draft.spec
    noise = rng.standard_normal((3, spec.block_size, spec.hidden_size)).astype(np.float32)
    k, v = rng.standard_normal((2, 3, L, 20, spec.num_key_value_heads, spec.head_dim)).astype(np.float32)
    expected = Graphs(tmp_path / "engine").draft(noise, (k, v), [0, 1, 2], [20, 0, 7])
    monkeypatch.setattr(lowering, "leave_out_padding", lambda graph: None)
    found = Graphs(tmp_path / "engine").draft(noise, (k, v), [0, 1, 2], [20, 0, 7])
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_rows_of_padding_are_for_tensorrt_alone(quantized: Quantized) -> None:
    """NVFP4's graph has them; without, all that it reads is still there."""
    graph = onnx.load(quantized("tiny-gpt-oss-dflash", "nvfp4")[1] / "draft.onnx", load_external_data=False).graph
    operators = [node.op_type for node in graph.node]
    assert [operators.count(name) for name in ("Pad", "Slice", "Shape")] == [1, 2, 1]
    leave_out_padding(graph)
    assert {"Pad", "Slice", "Shape"}.isdisjoint(node.op_type for node in graph.node)
    made = {name for node in graph.node for name in node.output} | {value.name for value in graph.input}
    made |= {initializer.name for initializer in graph.initializer}
    assert {name for node in graph.node for name in node.input} <= made
    dense = onnx.load(quantized("tiny-gpt-oss-dflash", "fp8")[1] / "draft.onnx", load_external_data=False).graph
    assert "Pad" not in {node.op_type for node in dense.node}


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_attention_node_reads_the_cache_as_it_was_written(quantized: Quantized, draft: str) -> None:
    """k_scale and v_scale of every layer are those that context.onnx divided by."""
    checkpoint, engine = quantized(draft, "nvfp4-w4a16+fp8-kv")
    graph = onnx.load(engine / "draft.onnx", load_external_data=False).graph
    nodes = [node for node in graph.node if node.op_type == ATTENTION]
    for kv in "kv":
        assert [attribute(node, f"{kv}_scale") for node in nodes] == list(read_draft(checkpoint).cache_scales(kv))


def test_scales_that_differ_keep_their_own_gemm(quantized: Quantized, tmp_path: Path) -> None:
    """Layers that were scaled one by one (modelopt's FP8) give the right result in more GEMMs."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(quantized("tiny-gpt-oss-dflash", "nvfp4-w4a16")[0], checkpoint)
    rescale(checkpoint, "layers.0.self_attn.v_proj.weight_scale_2", 1.5)
    build(checkpoint, tmp_path / "engine")
    reference = ReferenceDrafter.load(dequantized(checkpoint, tmp_path / "dense"))
    assert_exact(tmp_path / "engine", reference)
    assert not (tmp_path / "engine" / "context_kv.safetensors").exists()
    # fc and 2 L projections; q, k and v of layer 0 apart.
    assert gemm_counts(tmp_path / "engine") == {"context": 1 + 2 * 2, "draft": 4 * 2 + 2}
