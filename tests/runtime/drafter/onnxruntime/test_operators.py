# SPDX-License-Identifier: Apache-2.0
"""The compiled operators against float64 (linear layers, attention), on every instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from dflash_trt import _C
from dflash_trt.engine.graph.onnx_builder import OPSET, PLUGIN_DOMAIN
from dflash_trt.runtime.drafter.onnxruntime.graph_session import model_session
from dflash_trt.runtime.drafter.onnxruntime.packed_linear import PACKED_LINEAR
from tests.plugins.cases import CORNER, FEATURES, REGULAR, Case
from tests.plugins.compare import assert_close
from tests.plugins.kernel.oracle import expect
from tests.plugins.onnx_node import INTEGERS, feeds_of, run
from tests.plugins.tensors import draw
from tests.plugins.test_reference import as_carried, random_case
from tests.quantize.samples import unpacked_int4

ISAS = _C.cpu_features()


@pytest.fixture(params=[1, 3])
def torch_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("size", "is_shared"), [(128, False), (1448, False), (1449, True)])
def test_threads_by_the_largest_weight(torch_threads: int, size: int, is_shared: bool, tmp_path: Path) -> None:
    ports = f"(float[1,{size}] x) => (float[1,{size}] y)"
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> one {ports} {{ y = MatMul(x, w) }}')
    model.graph.initializer.append(numpy_helper.from_array(np.ones((size, size), np.float32), "w"))
    session = model_session(model, tmp_path)
    assert session.get_session_options().intra_op_num_threads == (torch_threads if is_shared else 1)


FLOAT32 = 2e-5  # relative error: rounding of the sums, and of scores in the hundreds
CASES = [case for case in (*REGULAR, *FEATURES, *CORNER) if case.B and max(case.context_lengths) < 10_000]
SEEDS = range(40)


def compare(case: Case, isa: str) -> None:
    case = replace(case, output_scale=0.0)  # computed by the lowering
    expected = expect(as_carried(case), draw(case)).output
    actual = torch.from_numpy(run(case, feeds_of(case, draw(case)), isa)).double()
    assert_close(actual, expected, FLOAT32 * expected.abs().max() * torch.ones_like(expected))


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=() if i % 3 == 0 else pytest.mark.full) for i, c in enumerate(CASES)]
)
def test_cases(case: Case) -> None:
    compare(case, "best")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < 3 else pytest.mark.full) for s in SEEDS])
def test_random_cases(seed: int, isa: str) -> None:
    compare(random_case(seed), isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("D", [2, 6, 16, 50])
def test_head_dims_that_are_no_vectors(D: int, isa: str) -> None:
    """Draft checkpoints may have them, although the plugin does not."""
    compare(Case(name="dims", N=6, G=3, D=D, S=5, context_lengths=(40, 0, 3), window=9, sinks=True), isa)


PAGED = Case(name="paged", N=4, G=2, S=8, L=2, layer=1, context_lengths=(70, 5, 96), causal=True, window=50)


def test_pages_in_any_order_are_the_slots_in_one() -> None:
    """[B, M] with pages of 32 rows; entries after a context's own are never read."""
    feeds = feeds_of(PAGED, draw(PAGED))
    slots, L, rows, G, D = feeds["k_cache"].shape
    assert rows == 96
    order = np.random.default_rng(0).permutation(3 * slots)
    paged = dict(feeds)
    for name in ("k_cache", "v_cache"):
        pages = feeds[name].reshape(slots, L, 3, 32, G, D).swapaxes(1, 2).reshape(3 * slots, L, 32, G, D)
        paged[name] = np.empty_like(pages)
        paged[name][order] = pages
    table = order.reshape(slots, 3).astype(np.int32)
    table[1, 1:] = -1
    paged["page_ids"] = table
    np.testing.assert_array_equal(run(PAGED, paged, "best"), run(PAGED, feeds, "best"))
    np.testing.assert_array_equal(run(PAGED, paged, "best", num_threads=3), run(PAGED, feeds, "best"))


def test_a_row_depends_on_its_request_alone() -> None:
    feeds = feeds_of(PAGED, draw(PAGED))
    alone = replace(PAGED, context_lengths=PAGED.context_lengths[1:2])
    batched = {"qkv", "rope", *INTEGERS}
    one = {name: value[1:2] if name in batched else value for name, value in feeds.items()}
    np.testing.assert_array_equal(run(alone, one, "best")[0], run(PAGED, feeds, "best")[1])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("context_lengths", [70, 5, 97], "context_lengths: expected what the pages hold"),
        ("context_lengths", [70, -1, 96], "context_lengths: expected what the pages hold"),
        ("page_ids", [[0], [3], [1]], "page_ids: expected pages of the cache"),
        ("page_ids", [0, 1, 2], r"expected page_ids \[B, M\]"),
    ],
)
def test_attention_that_does_not_fit_is_refused(name: str, value: object, expected: str) -> None:
    feeds = feeds_of(PAGED, draw(PAGED)) | {name: np.array(value, dtype=np.int32)}
    with pytest.raises(ort_errors.InvalidArgument, match=expected):
        run(PAGED, feeds, "best")


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ort_errors.RuntimeException, match="found mmx"):
        run(PAGED, feeds_of(PAGED, draw(PAGED)), isa="mmx")


FORMATS = ("FLOAT", "FLOAT16", "BFLOAT16", "FP8", "NVFP4", "INT4")
DTYPES = {"FLOAT": np.float32, "FLOAT16": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "FP8": ml_dtypes.float8_e4m3fn}
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
SCALE = 0.37


class Weight(NamedTuple):
    """A packed weight and the numbers that it means [N, K], each product in float32."""

    inputs: dict[str, np.ndarray]
    values: np.ndarray


def weight(kind: str, rows: int, columns: int, seed: int = 0) -> Weight:
    rng = np.random.default_rng(seed)
    if kind == "NVFP4":
        nibbles = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
        scales = rng.uniform(0.1, 4, (rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
        units = scales.astype(np.float32) * np.float32(SCALE)
        codes = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        return Weight({"codes": codes, "block_scales": scales.view(np.uint8)}, E2M1[nibbles] * units.repeat(16, axis=1))
    if kind == "INT4":
        codes = rng.integers(0, 256, (rows // 2, columns), dtype=np.uint8)
        scales = rng.uniform(0.1, 4, (rows, columns // 32)).astype(np.float32)
        values = unpacked_int4(codes, scales.astype(ml_dtypes.bfloat16).astype(np.float32))
        return Weight({"codes": codes, "block_scales": scales.view(np.uint8)}, values)
    stored = rng.standard_normal((rows, columns)).astype(DTYPES[kind])
    factor = np.float32(SCALE if kind == "FP8" else 1)
    return Weight({"codes": stored.view(np.uint8).reshape(rows, -1)}, stored.astype(np.float32) * factor)


def session(kind: str, names: list[str], isa: str = "best", num_threads: int = 1) -> onnxruntime.InferenceSession:
    """The node alone, on x and the inputs `names`."""
    attributes = {"format": kind, "scale": SCALE, "instruction_set": isa}
    node = helper.make_node(PACKED_LINEAR, ["x", *names], ["out"], domain=PLUGIN_DOMAIN, **attributes)
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    inputs += [helper.make_tensor_value_info(name, TensorProto.UINT8, None) for name in names]
    outputs = [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "linear", inputs, outputs)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(PLUGIN_DOMAIN, 1)]
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(_C.__file__)
    options.intra_op_num_threads = num_threads
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def multiply(
    kind: str, x: np.ndarray, inputs: dict[str, np.ndarray], isa: str = "best", **options: float
) -> np.ndarray:
    (out,) = session(kind, list(inputs), isa, **options).run(None, {"x": x, **inputs})
    return out


def random_rows(count: int, columns: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal((count, columns)).astype(np.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
def test_any_number_of_rows_and_columns(kind: str, isa: str) -> None:
    """Tiles of each size, whole ones and what is left of them."""
    for rows in (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33):
        for columns in (2, 22, 24, 26, 50) if kind == "INT4" else (1, 2, 3, 23, 24, 25, 50):
            case = weight(kind, columns, K := 64 if kind == "INT4" else 48, seed=rows)
            x = random_rows(rows, K)
            actual = multiply(kind, x, case.inputs, isa)
            np.testing.assert_allclose(actual, x.astype(np.float64) @ case.values.T, rtol=0, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("K", [16, 32, 176, 2880])
def test_sums(kind: str, isa: str, K: int) -> None:
    K = K // 32 * 32 or 64 if kind == "INT4" else K
    case, x = weight(kind, 30, K), random_rows(20, K)
    expected = x.astype(np.float64) @ case.values.T.astype(np.float64)
    bound = 2e-7 * K**0.5 * (np.abs(x) @ np.abs(case.values.T)).max()
    np.testing.assert_allclose(multiply(kind, x, case.inputs, isa), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind not in ("NVFP4", "INT4")])
def test_rows_that_are_no_vectors(kind: str, isa: str) -> None:
    """Memory after the end of a row is another row, or nothing: none of its numbers counts, not even NaN."""
    for K, rows in product((1, 3, 7, 15, 17, 31, 45), (1, 11)):
        case, x, name = weight(kind, 7, K), random_rows(rows, K), f"{K} columns, {rows} rows"
        expected = x.astype(np.float64) @ case.values.T
        np.testing.assert_allclose(multiply(kind, x, case.inputs, isa), expected, rtol=0, atol=1e-4, err_msg=name)
        x[-1] = np.nan
        actual = multiply(kind, x, case.inputs, isa)
        np.testing.assert_allclose(actual[:-1], expected[:-1], rtol=0, atol=1e-4, err_msg=name)
        assert np.isnan(actual[-1]).all(), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 16])  # alone; enough that some decode first
def test_each_code_means_what_it_should_to_the_bit(isa: str, rows: int) -> None:
    """A row of an identity picks one column of the weight."""
    for kind, bits in (("FP8", 8), ("FLOAT16", 16), ("BFLOAT16", 16)):
        codes = np.arange(2**bits, dtype=f"<u{bits // 8}").reshape(-1, 16)  # [N, 16]
        with np.errstate(invalid="ignore"):
            values = codes.view(DTYPES[kind]).astype(np.float32) * np.float32(SCALE if kind == "FP8" else 1)
        # 0 * infinity and 0 * NaN would spread over the row.
        finite = np.isfinite(values).all(axis=1)
        picked = [
            multiply(kind, np.eye(16, dtype=np.float32)[i : i + rows], {"codes": codes.view(np.uint8)}, isa)
            for i in range(0, 16, rows)
        ]
        actual = np.concatenate(picked).T
        np.testing.assert_array_equal(actual[finite], values[finite])
        nan = np.isnan(values).any(axis=1)
        assert nan.any()
        assert np.isnan(actual[nan]).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [4, 16])
def test_each_code_of_nvfp4_with_each_scale(isa: str, rows: int) -> None:
    nibbles = np.tile(np.arange(16, dtype=np.uint8), (127, 1))
    scales = np.arange(127, dtype=np.uint8)[:, None]  # all but NaN; they have no sign
    units = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(SCALE)
    inputs = {"codes": nibbles[:, ::2] | nibbles[:, 1::2] << 4, "block_scales": scales}
    eye = np.eye(16, dtype=np.float32)
    actual = np.concatenate([multiply("NVFP4", eye[i : i + rows], inputs, isa) for i in range(0, 16, rows)]).T
    np.testing.assert_array_equal(actual, E2M1[nibbles] * units)


@pytest.mark.parametrize("isa", ISAS)
def test_each_code_of_int4_by_scales_as_bfloat16(isa: str) -> None:
    """Both rows of a pair; scales at, above and below the middle of two bfloat16."""
    low, high = np.meshgrid(np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8))
    codes = (low | high << 4).reshape(8, 32)
    scales = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20] * 4, np.float32)[:, None]
    expected = unpacked_int4(codes, scales.astype(ml_dtypes.bfloat16).astype(np.float32))
    inputs = {"codes": codes, "block_scales": scales.view(np.uint8)}
    np.testing.assert_array_equal(multiply("INT4", np.eye(32, dtype=np.float32), inputs, isa).T, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", FORMATS)
def test_a_number_depends_on_its_row_and_its_column_alone(kind: str, isa: str) -> None:
    N, K = (62, 96) if kind == "INT4" else (61, 80)
    case, x = weight(kind, N, K), random_rows(23, K)
    whole = multiply(kind, x, case.inputs, isa)
    for row in range(len(x)):
        np.testing.assert_array_equal(multiply(kind, x[row : row + 1], case.inputs, isa)[0], whole[row])
    part = {name: array[40 * len(array) // N :] for name, array in case.inputs.items()}
    np.testing.assert_array_equal(multiply(kind, x, part, isa), whole[:, 40:])


@pytest.mark.parametrize("kind", FORMATS)
def test_threads_share_the_columns(kind: str) -> None:
    case, x = weight(kind, 1000, 256), random_rows(40, 256)  # enough to be worth more than one
    one = multiply(kind, x, case.inputs)
    np.testing.assert_array_equal(multiply(kind, x, case.inputs, num_threads=3), one)
    np.testing.assert_allclose(one, x.astype(np.float64) @ case.values.T, rtol=0, atol=1e-3)


def test_codes_may_lie_anywhere() -> None:
    """Codes at an odd address, as in a file."""
    case, x = weight("BFLOAT16", 5, 33), random_rows(2, 33)
    memory = np.zeros(case.inputs["codes"].size + 1, np.uint8)
    memory[1:] = case.inputs["codes"].reshape(-1)
    shifted = memory[1:].reshape(case.inputs["codes"].shape)
    np.testing.assert_array_equal(multiply("BFLOAT16", x, {"codes": shifted}), multiply("BFLOAT16", x, case.inputs))


@pytest.mark.parametrize(
    ("kind", "x", "shapes", "expected"),
    [
        ("FP8", (2, 16), {"codes": (4, 15)}, "as many codes in a row as x has columns"),
        ("FP8", (2, 16), {"codes": (4, 17)}, "as many codes in a row as x has columns"),
        ("BFLOAT16", (2, 16), {"codes": (4, 16)}, "as many codes in a row as x has columns"),
        ("FP8", (2, 1, 16), {"codes": (4, 16)}, r"x \[M, K\] and codes \[N, bytes of a row\]"),
        ("NVFP4", (2, 24), {"codes": (4, 12), "block_scales": (4, 1)}, "rows of whole blocks"),
        ("NVFP4", (2, 32), {"codes": (4, 16), "block_scales": (4, 1)}, r"block_scales \[N, K / 16\]"),
        ("NVFP4", (2, 32), {"codes": (4, 16)}, r"block_scales \[N, K / 16\]"),
        ("INT4", (2, 48), {"codes": (2, 48), "block_scales": (4, 6)}, "rows of whole blocks"),
        ("INT4", (2, 64), {"codes": (2, 32), "block_scales": (4, 8)}, "as many codes in a row as x has columns"),
        ("INT4", (2, 64), {"codes": (2, 64), "block_scales": (2, 8)}, r"block_scales \[N, K / 8\]"),
    ],
)
def test_what_does_not_fit_is_refused(
    kind: str, x: tuple[int, ...], shapes: dict[str, tuple[int, ...]], expected: str
) -> None:
    inputs = {name: np.zeros(shape, np.uint8) for name, shape in shapes.items()}
    with pytest.raises(ort_errors.InvalidArgument, match=f"PackedLinear: expected {expected}"):
        multiply(kind, np.zeros(x, np.float32), inputs)


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(ort_errors.RuntimeException, match=r"expected format FLOAT, .* found INT8"):
        session("INT8", ["codes"])
    with pytest.raises(ort_errors.RuntimeException, match="found mmx"):
        session("FP8", ["codes"], isa="mmx")
