# SPDX-License-Identifier: Apache-2.0
"""Programs of graphs: products of quantised numbers, weights in their file, one kernel between two products."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, parser
from torch import Tensor

from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.device.launcher import CudaLauncher
from dflash_trt.engine.executor import DraftInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.errors import EngineError
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.drafter.torch import operators, scaled_linear
from dflash_trt.runtime.drafter.torch.graph_program import Program
from dflash_trt.runtime.drafter.torch.onnx_graph import OnnxGraph
from dflash_trt.runtime.drafter.torch.scaled_linear import (
    biased_linear,
    fp4_linear,
    fp4_product,
    fp8_linear,
    fp8_product,
    patterns,
)
from dflash_trt.runtime.drafter.torch.stored_weights import StoredWeights
from dflash_trt.runtime.drafter.torch_executor import TorchExecutor, not_compiled
from tests.checkpoint.samples import refusal
from tests.contract.cuda_graphs import pretended_gpu
from tests.runtime.drafter.test_torch_executor import open_torch, run
from tests.runtime.drafter.torch.drafts import MAKERS
from tests.runtime.drafter.torch.inductor import compile_as_on_gpu

CPU = torch.device("cpu")


def graph_of(directory: Path, file: str = "draft.onnx") -> OnnxGraph:
    return OnnxGraph(directory, file, StoredWeights(directory, CPU))


def operators_of(program: Program) -> list[str]:
    return [getattr(call.operator, "__name__", "fused") for call in program.calls]


def replaced(engine: Path, change: Callable[[onnx.GraphProto], object]) -> Path:
    """The engine, its draft.onnx changed."""
    file = engine / "draft.onnx"
    model = onnx.load(file, load_external_data=False)
    change(model.graph)
    onnx.save(model, file)
    return engine


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    MAKERS["gpt-oss"](tmp_path)
    return tmp_path / "engine"


def node_of(graph: onnx.GraphProto, op_type: str) -> onnx.NodeProto:
    return next(node for node in graph.node if node.op_type == op_type)


REFUSED: dict[str, tuple[Callable[[onnx.GraphProto], object], str]] = {
    "an operator": (lambda g: setattr(node_of(g, "Sigmoid"), "op_type", "Erf"), "found Erf (it has no function here)"),
    "an attribute": (
        lambda g: node_of(g, "Gemm").attribute.append(helper.make_attribute("alpha", 2.0)),
        "found Gemm (got an unexpected keyword argument 'alpha')",
    ),
    "an input": (lambda g: node_of(g, "Gemm").input.append("bias"), "found Gemm (3 inputs)"),
    "a computed shape": (
        lambda g: node_of(g, "Reshape").input.__setitem__(1, "positions"), "found Reshape (shape is computed)"
    ),
    "a version of the node": (
        lambda g: next(
            a for a in node_of(g, "DFlashKVInjectionAttention").attribute if a.name == "plugin_version"
        ).__setattr__("s", b"2"),
        "found DFlashKVInjectionAttention (expected plugin_version 5, found 2)",
    ),
    "a head that the kernel does not take": (
        lambda g: next(
            a for a in node_of(g, "DFlashKVInjectionAttention").attribute if a.name == "head_dim"
        ).__setattr__("i", 48),
        "head_dim: expected 64, 96, 128 or 256, found 48",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_compute_is_refused_by_name(name: str, engine: Path) -> None:
    change, expected = REFUSED[name]
    graph = graph_of(replaced(engine, change))
    message = refusal(lambda: Program(graph, ["hidden"]), EngineError)
    assert re.match(
        rf"{engine / 'draft.onnx'}: node \S+: expected an operator that the torch executor computes", message
    )
    assert expected in message
    assert "use --device cpu" in message


@pytest.mark.parametrize(("key", "value", "expected"), [
    ("offset", str(2**40), f"at {2**40} of the"), ("length", "3", "found 3 at"), ("location", "../w", "of '../w'"),
])  # fmt: skip
def test_weights_that_are_elsewhere_are_refused(key: str, value: str, expected: str, engine: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        stored = next(i for i in graph.initializer if i.data_location == TensorProto.EXTERNAL)
        next(entry for entry in stored.external_data if entry.key == key).value = value

    message = refusal(lambda: graph_of(replaced(engine, change)), EngineError)
    assert expected in message
    assert "bytes, found" in message


def test_weights_stay_in_the_engines_file(engine: Path) -> None:
    """Dense matrices are mapped, and those that both graphs read are mapped once."""
    weights = StoredWeights(engine, CPU)
    programs = [Program(OnnxGraph(engine, f"{name}.onnx", weights), outputs) for name, outputs in
                (("context", ["kv"]), ("draft", ["hidden"]))]  # fmt: skip
    maps = [
        tuple(int(bound, 16) for bound in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(engine / SINGLE))
    ]
    stored = (engine / SINGLE).stat().st_size
    matrices = [t for program in programs for t in program.constants.values() if t.dtype == torch.bfloat16]
    constants = {id(tensor): tensor for tensor in matrices}.values()
    mapped = [t for t in constants if any(begin <= t.data_ptr() < end for begin, end in maps)]
    assert sum(t.nbytes for t in mapped) > 0.75 * stored
    assert sum(t.nbytes for t in constants) < 1.25 * stored  # k and v of all layers once more, in one matrix


def test_fp8_codes_are_multiplied_as_they_are(tmp_path: Path) -> None:
    MAKERS["fp8+fp8-kv"](tmp_path)
    program = Program(graph_of(tmp_path / "engine"), ["hidden"], patterns(CPU))
    counts = [operators_of(program).count(name) for name in ("fp8_product", "gemm", "dequantize")]
    assert counts == [12, 0, 0]
    x, weight = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((5, 32), (16, 32)))
    scales = torch.tensor(0.013), torch.tensor(1.7)
    exact = (x.double() * scales[0]) @ (weight.double() * scales[1]).T
    found = fp8_product(x, weight, *scales)
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all()


def test_fp8_on_a_gpu_is_torchs_scaled_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called as on the H100: codes row-major and column-major, FLOAT scales of one number, BF16 out."""
    x, weight = torch.zeros(10, 32, dtype=torch.float8_e4m3fn), torch.zeros(48, 32, dtype=torch.float8_e4m3fn)
    scales = torch.tensor(1.0), torch.tensor(2.0)
    asked: list[Any] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, out_dtype: asked.extend([*args, out_dtype]))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    fp8_product(x, weight, *scales)
    assert asked[0] is x
    assert (asked[1].shape, asked[1].stride()) == ((32, 48), (1, 32))
    assert asked[2:] == [*scales, torch.bfloat16]


def unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Block scales [rows, columns] by cuBLAS's formula for where each lies."""
    m, k = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    tiles = -(-columns // 4)
    place = ((m // 128) * tiles + k // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + k % 4
    return scales.view(torch.uint8)[torch.from_numpy(place)].view(torch.float8_e4m3fn).float()


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Sequence[Tensor], recipe_a: Any, scale_b: Sequence[Tensor], recipe_b: Any,
    *, swizzle_a: Any, swizzle_b: Any, output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.scaled_mm of FP4 with scales of blocks and of the whole, as torch documents it."""
    assert (
        [recipe.name for recipe in recipe_a] == [recipe.name for recipe in recipe_b] == ["BlockWise1x16", "TensorWise"]
    )
    assert (
        [order.name for order in swizzle_a] == [order.name for order in swizzle_b] == ["SWIZZLE_32_4_4", "NO_SWIZZLE"]
    )

    def values(codes: Tensor, scales: Sequence[Tensor]) -> Tensor:
        numbers = operators.unpacked(codes.view(torch.uint8), onnx_type=operators.FP4).float()
        blocks = unswizzled(scales[0], len(numbers), numbers.shape[1] // 16)
        return numbers * blocks.repeat_interleave(16, 1) * scales[1]

    return (values(a, scale_a) @ values(b.T, scale_b).T).to(output_dtype)


def test_fp4_codes_reach_torchs_scaled_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, swizzled and scaled so that the documented product is what the nodes compute; not yet run on a GPU."""
    MAKERS["nvfp4"](tmp_path)
    engine, generator = tmp_path / "engine", torch.Generator().manual_seed(0)
    weights = onnx.load(engine / "context.onnx", load_external_data=False).graph.initializer
    assert sum(weight.data_type == TensorProto.FLOAT4E2M1 for weight in weights) == 1
    nodes, products = (Program(graph_of(engine, "context.onnx"), ["kv"], used) for used in ([], [fp4_linear]))
    counts = [[operators_of(p).count(name) for name in ("gemm", "fp4_product")] for p in (nodes, products)]
    assert counts == [[2, 0], [1, 1]]  # fc is dense
    assert nodes.has_dequantised
    assert not products.has_dequantised
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    taps = torch.randn(150, 3 * 64, generator=generator).bfloat16()
    given = {"target_hidden": taps, "positions": torch.arange(150).int()}
    found, expected = products.run(given), nodes.run(given)
    for k_or_v in (0, 1):  # weights of a product are not rounded to BF16, and a code flips now and then
        exact = expected["kv"][:, k_or_v].float()
        assert (found["kv"][:, k_or_v] - exact).norm() < 0.1 * exact.norm()
    x, weight = (
        torch.randn(150, 64, generator=generator).bfloat16(),
        torch.randn(32, 64, generator=generator).bfloat16(),
    )
    scales = torch.tensor(0.004), torch.tensor(0.002)
    (a, a_scales), (b, b_scales) = (scaled_linear.packed_fp4(t, s) for t, s in zip((x, weight), scales, strict=True))
    exact = rounded_fp4(x, scales[0]) @ rounded_fp4(weight, scales[1]).T
    torch.testing.assert_close(
        fp4_product(a, a_scales, scales[0], b, b_scales, scales[1]).double(), exact, rtol=2.0**-8, atol=1e-5
    )


def rounded_fp4(x: Tensor, scale: Tensor) -> Tensor:
    codes, scales = operators.quantize_fp4(x, scale)
    return codes.double() * scales.double().repeat_interleave(16, -1) * scale.double()


def test_the_products_that_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        biased, *found[capability] = patterns(torch.device("cuda"))
        assert biased == biased_linear
    assert found == {(8, 0): [], (8, 9): [fp8_linear], (9, 0): [fp8_linear], (10, 0): [fp8_linear, fp4_linear],
                     (12, 0): [fp8_linear, fp4_linear]}  # fmt: skip


def test_dequantised_weights_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = MAKERS["nvfp4-w4a16"](tmp_path)
    run(open_torch(tmp_path / "engine", manifest), tmp_path / "engine")
    (message,) = [record.message for record in caplog.records if "dequantised" in record.message]
    assert (
        message == f"{tmp_path / 'engine'}: no product of these quantised weights here: they are dequantised into BF16"
    )


INT4_GRAPH = """<ir_version: 11, opset_import: ["" : 23]> one (bfloat16[M, 32] x) => (bfloat16[M, 16] y) {
    weight = DequantizeLinear <axis: int = 1, block_size: int = 16> (codes, scales)
    y = Gemm <transB: int = 1> (x, weight)
}"""


def test_int4_weights_by_blocks_need_no_pattern(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    numbers, scales = generator.integers(-8, 8, (16, 32)), generator.uniform(0.1, 1, (16, 2)).astype(np.float32)
    model = parser.parse_model(INT4_GRAPH)
    model.graph.initializer.append(helper.make_tensor("codes", TensorProto.INT4, (16, 32), numbers.reshape(-1)))
    model.graph.initializer.append(helper.make_tensor("scales", TensorProto.BFLOAT16, (16, 2), scales.reshape(-1)))
    onnx.save(model, tmp_path / "draft.onnx")
    program = Program(graph_of(tmp_path), ["y"])
    assert operators_of(program) == ["gemm"]
    x = torch.randn(3, 32).bfloat16()
    weight = torch.from_numpy(numbers) * torch.from_numpy(scales).bfloat16().double().repeat_interleave(16, 1)
    exact = x.double() @ weight.bfloat16().double().T
    torch.testing.assert_close(program.run({"x": x})["y"].double(), exact, rtol=2.0**-8, atol=1e-6)


def fuse(monkeypatch: pytest.MonkeyPatch, engine: Path, manifest: Manifest) -> list[Any]:
    """Fuses programs of drafters to come as on a GPU; what was given to torch.compile."""
    given: list[Any] = []
    made = torch.compile

    def compile_(module: Any, **options: Any) -> Any:
        given.append(module)
        return made(module, **options) if engine.name == "compiled" else module

    monkeypatch.setattr(torch, "compile", compile_)
    compile_as_on_gpu(monkeypatch)
    return given


@pytest.mark.parametrize("name", ["gpt-oss", "fp8+fp8-kv"])
def test_between_two_products_one_function(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits, and layers share functions."""
    manifest = MAKERS[name](tmp_path)
    expected = run(open_torch(tmp_path / "engine", manifest), tmp_path / "engine")
    given = fuse(monkeypatch, tmp_path / "engine", manifest)
    drafter = open_torch(tmp_path / "engine", manifest)
    found = run(drafter, tmp_path / "engine")
    assert {key: float((found[key] - expected[key]).abs().max()) for key in expected} == dict.fromkeys(expected, 0)
    assert 4 <= len(given) <= 16, len(given)
    if name == "gpt-oss":
        program = Program(graph_of(tmp_path / "engine"), ["hidden"])
        kinds = [kind for kind in operators_of(program) if kind not in ("reshape", "identity")]
        assert [kinds.count(kind) for kind in ("gemm", "attend")] == [12, 3]
        assert len(kinds) <= 12 + 3 + 15  # operators between two of them, too


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt-oss", "fp8+fp8-kv", "DFlash2"])
def test_compiled_it_is_as_close_to_onnx_runtime(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Inductor, for a CPU here: no fewer places of rounding may be farther off."""
    from tests.runtime.drafter.test_torch_executor import noise

    manifest = MAKERS[name](tmp_path)
    engine = (tmp_path / "engine").rename(tmp_path / "compiled")
    exact = run(open_drafter(engine, manifest, num_slots=3), engine)
    eager = noise(run(open_torch(engine, manifest), engine), exact)
    assert fuse(monkeypatch, engine, manifest) == []
    compiled = noise(run(open_torch(engine, manifest), engine), exact)
    assert 0 < compiled < 1.3 * eager


def test_exposed_values(tmp_path: Path) -> None:
    from dflash_trt.engine.graph.draft_graph import output_name

    manifest = MAKERS["gpt-oss"](tmp_path)
    names = [output_name(layer) for layer in range(3)]
    found = []
    for executor in ("torch", "onnxruntime"):
        drafter = open_drafter(tmp_path / "engine", manifest, num_slots=3, executor=executor, expose=names)
        generator = torch.Generator().manual_seed(0)
        drafter.inject([0, 1], [3, 4], torch.randn(7, manifest.draft.target_hidden_size, generator=generator))
        blocks = torch.randn(2, manifest.draft.block_size, manifest.draft.hidden_size, generator=generator)
        outputs = drafter.run([1, 0], blocks)
        found.append([outputs[name].float() for name in [*names, "hidden"]])
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == (2, manifest.draft.block_size, manifest.draft.hidden_size)
        assert float((ours - theirs).norm() / theirs.norm()) < 0.03


def test_a_gpu_without_fp8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights are dequantised; the attention kernel reads no cache in FP8."""
    manifest = MAKERS["fp8+fp8-kv"](tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr("dflash_trt._C.cuda_architectures", lambda: ["80"])
    executor = TorchExecutor(tmp_path / "engine", manifest, CudaLauncher(torch.device("cuda")))
    assert Program(graph_of(tmp_path / "engine"), ["hidden"], patterns(executor.device)).has_dequantised
    assert not Program(graph_of(tmp_path / "engine"), ["hidden"], patterns(CPU)).has_dequantised
    message = refusal(executor.load, EngineError)
    assert "expected a GPU of compute capability 8.9 or newer for an FP8 context cache, found 8.6" in message


@pytest.mark.parametrize("capability", [(8, 6), (9, 0)])
def test_triton_gets_fp8_codes_where_a_gpu_has_them(
    capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operators around them are fused in any case."""
    MAKERS["fp8+fp8-kv"](tmp_path)
    program = Program(graph_of(tmp_path / "engine"), ["hidden"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    before = Counter(call.operator for call in program.calls)
    program.fuse(not_compiled(torch.device("cuda")))
    after = Counter(call.operator for call in program.calls)
    codes = (operators.quantize, operators.dequantize)
    left = [before[operator] if capability < (8, 9) else 0 for operator in codes]
    assert min(before[operator] for operator in codes) > 0
    assert [after[operator] for operator in codes] == left
    assert (before[operators.square_root] > 0, after[operators.square_root]) == (True, 0)


def test_a_gpu_on_which_nothing_compiles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One warning for both graphs, which run operator by operator."""
    manifest = MAKERS["gpt-oss"](tmp_path)
    with pretended_gpu():
        drafter = open_drafter(tmp_path / "engine", manifest, device="cuda", executor="torch")
        drafter.close()
    (message,) = caplog.messages
    assert "torch.compile lacks Triton: a kernel for each operator" in message


def test_a_context_beyond_the_page_table(tmp_path: Path) -> None:
    drafter = open_torch(tmp_path / "engine", MAKERS["gpt-oss"](tmp_path))
    spec, most = drafter.spec, -(-drafter.spec.max_position_embeddings // TOKENS_PER_PAGE)
    blocks, page_ids = torch.zeros(1, spec.block_size, spec.hidden_size), torch.zeros(1, most + 1, dtype=torch.int32)
    inputs = DraftInputs(blocks, torch.zeros(1, spec.block_size), page_ids, torch.zeros(1))
    message = refusal(lambda: drafter.executor.draft(inputs), EngineError)
    assert f"expected at most {most} pages of one request" in message
    assert f"found {most + 1}" in message
