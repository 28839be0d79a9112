# SPDX-License-Identifier: Apache-2.0
"""Calls of TensorRT to the plugin while it builds, serialises, loads and runs an engine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dflash_trt import _C
from dflash_trt.engine.plans.tensorrt_api import installed_library
from tests.plugins import abi
from tests.plugins.abi import Creator, Plugin, Value, attribute, desc, dynamic
from tests.plugins.cases import Case, Pages
from tests.plugins.kernel.emulation import PLUGINS, compiler
from tests.plugins.tensors import attributes, draw, inputs

ATTRIBUTES = {
    "layer": 1, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6, "softmax_scale": 0.0884,
    "sliding_window": 64, "causal": 1, "k_scale": 1.0, "v_scale": 1.0, "fp8_cache": 0, "has_qkv_bias": 0,
    "fp8_output": 0, "output_scale": 1.0,
}  # fmt: skip
FIELDS = [attribute(name, value) for name, value in ATTRIBUTES.items()]
INT32 = abi.FIELD_INT32
NAMES = ("DFlashKVInjectionAttention", "5", "dflash_trt")


@pytest.fixture(scope="module")
def creator() -> Creator:
    return Creator(installed_library())


def fields(**changed: float) -> list[Value]:
    """FIELDS with these values in place of theirs."""
    return [attribute(name, value) for name, value in (ATTRIBUTES | changed).items()]


def make(creator: Creator, fields: list[Value] = FIELDS, phase: int = abi.BUILD) -> Plugin:
    plugin = creator.create(fields, phase)
    assert plugin is not None
    return plugin


@pytest.fixture
def plugin(creator: Creator) -> Iterator[Plugin]:
    made = make(creator)
    yield made
    made.close()


def shapes(B: int, S: int = 16, pages: int = 128, N: int = 32, G: int = 8, D: int = 128) -> list[tuple[int, ...]]:
    """Shapes of the node's inputs, then of its output."""
    block = (B, S, (N + 2 * G) * D), (D,), (D,), (B, S, D)
    return [*block, (5, 2), (6,), (6, pages), (B,), (B,), (B, S, N * D)]


TYPES = [abi.BF16, abi.BF16, abi.BF16, abi.FLOAT, abi.INT64, abi.INT64, abi.INT32, abi.INT32, abi.INT32, abi.BF16]


def descs(B: int, types: list[int] = TYPES, **sizes: int) -> tuple[list[abi.Desc], list[abi.Desc]]:
    every = [desc(shape, dtype) for shape, dtype in zip(shapes(B, **sizes), types, strict=True)]
    return every[:-1], every[-1:]


def profile(least: int, most: int, **sizes: int) -> tuple[list[abi.DynamicDesc], list[abi.DynamicDesc]]:
    """B from `least` to `most`."""
    pairs = zip(shapes(most, **sizes), shapes(least, **sizes), TYPES, strict=True)
    every = [dynamic(high, dtype, low) for high, low, dtype in pairs]
    return every[:-1], every[-1:]


def test_interfaces_and_names(creator: Creator, plugin: Plugin) -> None:
    assert abi.interface(creator.this) == ("PLUGIN CREATOR_V3ONE", 1, 0)
    assert abi.interface(plugin.this) == ("PLUGIN", 1, 0)
    assert abi.interface(plugin.core) == ("PLUGIN_V3ONE_CORE", 1, 0)
    assert abi.interface(plugin.build) == ("PLUGIN_V3ONE_BUILD", 1, 0)
    assert abi.interface(plugin.runtime) == ("PLUGIN_V3ONE_RUNTIME", 1, 0)
    assert creator.names() == plugin.names() == NAMES
    assert plugin.tactics() == (0, 0, None, 100, None)
    assert creator.field_names() == [(field.name, field.type) for field in FIELDS]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        *(([f for f in FIELDS if f.name != name], f"field {name}: expected, but not given") for name in ATTRIBUTES),
        ([*FIELDS, Value("sinks", 1, INT32)], "field sinks: not an attribute of this plugin"),
        ([*FIELDS, Value("format_version", 1, INT32)], "field format_version: not an attribute of this plugin"),
        ([*FIELDS, FIELDS[4]], "field rms_norm_eps: expected once, found twice"),
        ([Value("layer", 1, abi.FIELD_INT64), *FIELDS[1:]], "field layer: expected int32, found field type 10"),
        ([Value("layer", 1.0, 1), *FIELDS[1:]], "field layer: expected int32, found float32"),
        ([*FIELDS[:9], Value("v_scale", 1, INT32), *FIELDS[10:]], "field v_scale: expected float32, found int32"),
        ([*FIELDS[:9], Value("v_scale", 1, abi.FIELD_FLOAT64), *FIELDS[10:]],
         "field v_scale: expected float32, found field type 2"),
        ([replace(FIELDS[0], length=2), *FIELDS[1:]], "field layer: expected 1 value, found 2"),
        (fields(layer=-1), "field layer: expected 0 to 2147483646, found -1"),
        (fields(head_dim=80), "field head_dim: expected 64, 96, 128 or 256, found 80"),
        (fields(num_kv_heads=7), "field num_kv_heads: expected a divisor of num_heads 32, found 7"),
        (fields(causal=2), "field causal: expected 0 to 1, found 2"),
        (fields(v_scale=-1.0), "field v_scale: expected a positive finite number, found -1"),
        (fields(fp8_cache=2), "field fp8_cache: expected 0 or 1, found 2"),
        (fields(has_qkv_bias=-1), "field has_qkv_bias: expected 0 or 1, found -1"),
        (fields(fp8_output=2, output_scale=0.5), "field fp8_output: expected 0 or 1, found 2"),
        (fields(fp8_output=1, output_scale=0.0), "field output_scale: expected a positive finite number, found 0"),
        (fields(output_scale=0.5), "field output_scale: expected 1 for a bfloat16 output, found 0.5"),
    ],
)  # fmt: skip
def test_wrong_fields(creator: Creator, capfd: pytest.CaptureFixture[str], given: list[Value], message: str) -> None:
    assert creator.create(given, abi.BUILD, layer="/layers.1/attention") is None
    assert capfd.readouterr().err == f"[dflash_trt] /layers.1/attention: {message}\n"


def test_an_engine_holds_the_attributes_and_a_version(creator: Creator, plugin: Plugin) -> None:
    stored = plugin.serialized()
    assert stored[0] == Value("format_version", 3, abi.FIELD_INT32)
    assert {value.name: value.value for value in stored[1:]} == pytest.approx(ATTRIBUTES)
    loaded = make(creator, stored, abi.RUNTIME)
    assert loaded.serialized() == stored
    loaded.close()


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (4, "this library reads 3, the engine holds 4; build the engine with this library"),
        (2, "this library reads 3, the engine holds 2; build the engine with this library"),
        (None, "expected, but not given"),
    ],
)
def test_another_format_version_is_refused(
    creator: Creator, plugin: Plugin, capfd: pytest.CaptureFixture[str], version: int | None, message: str
) -> None:
    """Before anything else: a later format may have fields that this one does not know."""
    other = [] if version is None else [Value("format_version", version, abi.FIELD_INT32), attribute("new", 3)]
    assert creator.create([*other, *plugin.serialized()[1:]], abi.RUNTIME) is None
    assert capfd.readouterr().err == f"[dflash_trt] layer: field format_version: {message}\n"


def test_a_clone_is_the_same_and_lives_on_its_own(creator: Creator) -> None:
    plugin = make(creator)
    clone, attached = plugin.clone(), plugin.attach()
    before = plugin.serialized()
    plugin.close()
    assert clone.serialized() == attached.serialized() == before
    clone.close()
    attached.close()


def test_the_output_is_of_the_queries_shape_and_dtype(plugin: Plugin) -> None:
    assert plugin.num_outputs() == 1
    assert plugin.output_types(TYPES[:-1]) == (0, [abi.BF16])
    assert plugin.output_types([abi.HALF, *TYPES[1:-1]]) == (0, [abi.HALF])
    expressions = [abi.DimsExprs(3, (0x1000 + i, 0x2000 + i, 0x3000 + i)) for i in range(9)]
    status, shape = plugin.output_shape(expressions, {32 * 128: 0x4000})
    assert (status, shape.rank, list(shape.d[:3])) == (0, 3, [0x1000, 0x2000, 0x4000])
    joined = [abi.DimsExprs(2, (0x1000, 0x2000)), *expressions[1:]]
    status, shape = plugin.output_shape(joined, {32 * 128: 0x4000})
    assert (status, shape.rank, list(shape.d[:2])) == (0, 2, [0x1000, 0x4000])


def test_an_fp8_output(creator: Creator) -> None:
    plugin = make(creator, fields(fp8_output=1, output_scale=0.25))
    assert plugin.output_types(TYPES[:-1]) == (0, [abi.FP8])
    assert accepted(plugin, [*TYPES[:-1], abi.FP8])
    assert not accepted(plugin, TYPES)
    (ins, outs), (_, fp8) = descs(3), descs(3, types=[*TYPES[:-1], abi.FP8])
    assert [plugin.on_shape_change(ins, found) == 0 for found in (outs, fp8)] == [False, True]
    assert plugin.configure(*profile(1, 4)) == 0
    assert plugin.workspace(*profile(1, 4)) == make(creator).workspace(*profile(1, 4))


def test_the_bias_stands_before_the_sinks(creator: Creator) -> None:
    """An attribute tells the two apart where one of them is there."""
    with_bias, width = make(creator, fields(has_qkv_bias=1)), (32 + 2 * 8) * 128
    types = [*TYPES[:-1], abi.BF16, abi.BF16]
    assert accepted(with_bias, types)
    assert accepted(with_bias, [*TYPES[:-1], abi.BF16, abi.FLOAT, abi.BF16])
    assert not accepted(with_bias, [*TYPES[:-1], abi.FLOAT, abi.BF16])
    assert not accepted(make(creator), types)
    ins, outs = descs(2)
    assert with_bias.on_shape_change([*ins, desc((width,), abi.BF16)], outs) == 0
    assert with_bias.on_shape_change([*ins, desc((width,), abi.BF16), desc((32,), abi.FLOAT)], outs) == 0
    assert with_bias.on_shape_change([*ins, desc((width - 1,), abi.BF16)], outs) != 0


def test_rows_of_all_requests_may_be_one_axis(plugin: Plugin) -> None:
    ins, _ = descs(2)
    joined = desc((2 * 16, (32 + 2 * 8) * 128), abi.BF16)
    assert plugin.on_shape_change([joined, *ins[1:]], [desc((2 * 16, 32 * 128), abi.BF16)]) == 0
    assert plugin.on_shape_change([joined, *ins[1:]], [desc((2 * 16 + 1, 32 * 128), abi.BF16)]) != 0


@pytest.mark.parametrize("count", [8, 11])
def test_another_number_of_inputs_is_refused(plugin: Plugin, capfd: pytest.CaptureFixture[str], count: int) -> None:
    assert plugin.output_types([abi.BF16] * count)[0] != 0
    assert f"getOutputDataTypes: inputs: expected 9 tensors, or 10 with sinks, found {count}" in capfd.readouterr().err


def accepted(plugin: Plugin, types: list[int], layout: int = 0, at: int = -1) -> bool:
    """Asks for one position after the other, as TensorRT does; `layout` is that of position `at`."""
    tensors = [abi.DynamicDesc(desc((1,), dtype, layout if i == at else 0)) for i, dtype in enumerate(types)]
    return all(plugin.supports(position, tensors[: position + 1] + tensors[position + 1 :], len(types) - 1)
               for position in range(len(types)))  # fmt: skip


def test_dtypes(plugin: Plugin) -> None:
    half = [abi.HALF if dtype == abi.BF16 else dtype for dtype in TYPES]
    for types in (TYPES, half, [*TYPES[:-1], abi.FLOAT, abi.BF16]):
        assert accepted(plugin, types)
    for position in range(len(TYPES)):
        for other in {*TYPES, abi.HALF, abi.INT8, abi.BOOL, abi.FP8} - {TYPES[position]}:
            changed = [*TYPES[:position], other, *TYPES[position + 1 :]]
            assert not accepted(plugin, changed), (position, other)
        assert not accepted(plugin, TYPES, layout=abi.CHW2, at=position), position
    assert not accepted(plugin, [*TYPES[:-1], abi.HALF, abi.BF16])  # sinks


@pytest.mark.full  # the library's build takes long
def test_an_fp8_cache_is_refused_where_the_gpu_converts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "libany_gpu.so"
    sources = [path for path in PLUGINS.rglob("*.cpp") if path.name not in ("no_cuda.cpp", "hand_computed.cpp")]
    sources.append(Path(__file__).parent / "kernel" / "any_gpu.cpp")
    defines = ['-DDFLASH_HOST_CODE="of any GPU"', '-DDFLASH_CUDA_ARCHITECTURES=""']
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", *defines]
    command = [compiler(), *flags, f"-I{PLUGINS}", *map(str, sources)]
    subprocess.run([*command, "-o", str(library)], check=True)
    fp8 = make(Creator(library), fields(fp8_cache=1))
    for gpu, accepts in (("80", False), ("86", False), ("89", True), ("90", True), ("121", True), ("0", True)):
        monkeypatch.setenv("DFLASH_TEST_GPU", gpu)
        assert accepted(fp8, TYPES) == accepts
        assert accepted(make(Creator(library)), TYPES)
    told = (
        "[dflash_trt] supportsFormatCombination: fp8_cache: expected a GPU of compute capability 8.9 or newer,"
        " found 8.{}; to build for another GPU, hide this one: CUDA_VISIBLE_DEVICES=\n"
    )
    assert capfd.readouterr().err == told.format(0) + told.format(6)


def test_a_profile_that_fits_and_its_workspace(plugin: Plugin, capfd: pytest.CaptureFixture[str]) -> None:
    assert plugin.configure(*profile(1, 64)) == 0
    assert plugin.on_shape_change(*descs(7)) == 0
    # the output may have any bounds while TensorRT builds
    ins, _ = profile(1, 64)
    for shape in ((-1, -1, -1), (2**31 - 1, 1, 1)):
        out = [dynamic(shape, abi.BF16, shape)]
        assert plugin.configure(ins, out) == 0
        assert plugin.workspace(ins, out) == plugin.workspace(*profile(1, 64)) > 0
    assert plugin.workspace(*profile(1, 4, S=33)) == 1 << 60
    assert capfd.readouterr().err == "[dflash_trt] getWorkspaceSize: block: expected 1 to 32, found 33\n"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"S": 33}, "block: expected 1 to 32, found 33"),
        ({"pages": 0}, "max_pages: expected at least 1, found 0"),
        ({"N": 16}, "qkv: expected shape [257, 16, 6144], found [257, 16, 4096]"),
        ({}, "batch: expected 0 to 256, found 257"),
    ],
)
def test_a_profile_beyond_the_limits_is_refused(
    plugin: Plugin, capfd: pytest.CaptureFixture[str], sizes: dict[str, int], message: str
) -> None:
    B = 257 if not sizes or "N" in sizes else 4
    assert plugin.configure(*profile(1, B, **sizes)) != 0
    assert capfd.readouterr().err == f"[dflash_trt] configurePlugin: {message}\n"
    assert plugin.on_shape_change(*descs(B, **sizes)) != 0
    assert capfd.readouterr().err == f"[dflash_trt] onShapeChange: {message}\n"


def test_a_layer_beyond_the_cache_is_refused(creator: Creator, capfd: pytest.CaptureFixture[str]) -> None:
    plugin = make(creator, fields(layer=5))
    assert plugin.configure(*profile(1, 2)) != 0
    assert "layer: expected 0 to 4, found 5" in capfd.readouterr().err
    plugin.close()


def test_the_workspace_is_enough_for_every_block_of_the_profile(creator: Creator) -> None:
    """This number of heads fills a GPU with the longest block, which then needs no workspace, but not with a shorter
    one.
    """
    sizes = {"N": 1024, "G": 128, "D": 64}
    heads = {"num_heads": 1024, "num_kv_heads": 128, "head_dim": 64, "layer": 0}
    needed = [
        workspace_bytes(Case(name="", **sizes, S=S, pages=Pages(32), C_max=4096, context_lengths=(0,)))
        for S in (32, 16, 1)
    ]
    assert needed[0] == 0 < needed[2] < needed[1]
    plugin = make(creator, fields(**heads, sliding_window=0))
    assert plugin.workspace(*profile(1, 1, S=32, **sizes)) >= max(needed)
    plugin.close()


def workspace_bytes(case: Case) -> int:
    tensors = draw(case)
    return _C.kv_injection_attention_workspace_bytes(
        attributes(case), list(inputs(case, tensors).values()), tensors.q.clone()
    )


def test_enqueue_without_a_shape_or_tensor_is_refused(plugin: Plugin, capfd: pytest.CaptureFixture[str]) -> None:
    ins, (out,) = descs(1)
    assert plugin.enqueue(ins, out, [16] * 10, None, 0) != 0
    assert "enqueue: inputs: expected 9 tensors, or 10 with sinks, found 0" in capfd.readouterr().err
    ins, outs = descs(1)
    assert plugin.on_shape_change(ins, outs) == 0
    assert plugin.enqueue(ins, outs[0], [16, 16, None, *[16] * 7], 16, 0) != 0
    assert capfd.readouterr().err == "[dflash_trt] enqueue: k_norm: expected a tensor, found a null pointer\n"


@pytest.mark.skipif(bool(_C.cuda_architectures()), reason="built with CUDA: `make test-gpu` enqueues")
def test_enqueue_in_a_build_without_cuda_says_so(plugin: Plugin, capfd: pytest.CaptureFixture[str]) -> None:
    ins, outs = descs(1)
    assert plugin.on_shape_change(ins, outs) == 0
    assert plugin.enqueue(ins, outs[0], [16] * 10, 16, 0) != 0
    assert "enqueue: this library was built without CUDA; build it with nvcc: cmake" in capfd.readouterr().err
