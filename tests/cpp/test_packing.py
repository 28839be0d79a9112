# SPDX-License-Identifier: Apache-2.0
"""The packers against modelopt's bytes and against the formulas in numpy."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from dflash_trt import _C
from tests.golden.packing.cases import cases
from tests.quantize.samples import int4_formula

GOLDEN = Path(__file__).parents[1] / "golden" / "packing" / "vectors.npz"
TYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}
E2M1_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)

type_names = pytest.mark.parametrize("type_name", TYPES)

Array = NDArray[np.generic]


def raw(weights: Array) -> Array:
    """Weights as the packers take them: numpy has no bfloat16, so its bits."""
    return weights.view(np.uint16) if weights.dtype == ml_dtypes.bfloat16 else weights


def typed(raw_weights: Array) -> Array:
    return raw_weights.view(ml_dtypes.bfloat16) if raw_weights.dtype == np.uint16 else raw_weights


def typed_cases(rows: int, columns: int, type_name: str) -> dict[str, Array]:
    dtype = TYPES[type_name]
    info = ml_dtypes.finfo(dtype)
    made = cases(rows, columns, step=float(info.eps), smallest=float(info.smallest_subnormal))
    return {name: weights.astype(dtype) for name, weights in made.items()}


def fp8_scale(amax: float) -> np.float32:
    return np.float32(amax) / np.float32(448)


def nvfp4_scale_2(amax: float) -> np.float32:
    return np.float32(amax) / np.float32(2688)


def guarded(rows: int, columns: int) -> tuple[Array, Array]:
    """An output of 0xee with a row of guard bytes on either side, and the whole."""
    whole = np.full((rows + 2, columns), 0xEE, np.uint8)
    return whole[1:-1], whole


def assert_guards(*wholes: Array) -> None:
    for whole in wholes:
        assert (whole[[0, -1]] == 0xEE).all()


def pack_fp8(weights: Array, scale: float, **execution: object) -> Array:
    out, whole = guarded(*weights.shape)
    _C.pack_fp8(raw(weights), scale, out, **execution)
    assert_guards(whole)
    return out


def pack_nvfp4(weights: Array, scale_2: float, **execution: object) -> SimpleNamespace:
    rows, columns = weights.shape
    data, data_whole = guarded(rows, columns // 2)
    scales, scales_whole = guarded(rows, columns // 16)
    _C.pack_nvfp4(raw(weights), scale_2, data, scales, **execution)
    assert_guards(data_whole, scales_whole)
    return SimpleNamespace(data=data, scales=scales)


def pack_int4(weights: Array, **execution: object) -> SimpleNamespace:
    rows, columns = weights.shape
    data, whole = guarded(rows // 2, columns)
    scales = np.full((rows + 2, columns // 32), -1, np.float32)
    _C.pack_int4(raw(weights), data, scales[1:-1], **execution)
    assert_guards(whole)
    assert (scales[[0, -1]] == -1).all()
    return SimpleNamespace(data=data, scales=scales[1:-1])


def packed_int4_formula(weights: Array) -> SimpleNamespace:
    codes, scales = int4_formula(weights)
    nibbles = codes.view(np.uint8) & 15
    return SimpleNamespace(data=nibbles[::2] | nibbles[1::2] << 4, scales=scales)


def e4m3(values: Array) -> Array:
    """Codes of float32 values, saturating."""
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def fp8_formula(weights: Array, scale: np.float32) -> Array:
    with np.errstate(over="ignore"):
        quotient = (weights.astype(np.float32) / scale).astype(weights.dtype)
    return e4m3(quotient.astype(np.float32))


def nvfp4_formula(weights: Array, scale_2: np.float32) -> SimpleNamespace:
    blocks = weights.astype(np.float32).reshape(len(weights), -1, 16)
    with np.errstate(over="ignore"):
        block_scale = np.abs(blocks).max(axis=2) / (np.float32(6) * scale_2)
    block_scale[block_scale == 0] = 1
    scales = e4m3(np.maximum(block_scale, np.float32(2**-9)))
    divisor = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale_2
    with np.errstate(all="ignore"):
        quotient = blocks / divisor[:, :, None]
    magnitude = np.abs(quotient)
    code = np.searchsorted(E2M1_BOUNDS, magnitude).astype(np.uint8)  # NaN (0 / 0) is above all bounds
    code += np.isin(magnitude, E2M1_BOUNDS[1::2])
    code |= (quotient < 0).astype(np.uint8) << 3
    code = code.reshape(weights.shape)
    return SimpleNamespace(data=code[:, ::2] | code[:, 1::2] << 4, scales=scales)


def assert_same(found: Array, expected: Array, what: str) -> None:
    differing = np.argwhere(found != expected)
    assert found.shape == expected.shape
    assert differing.size == 0, (
        f"{what}: {len(differing)} of {found.size} bytes differ, first at {differing[0]}: "
        f"{found[tuple(differing[0])]}, expected {expected[tuple(differing[0])]}"
    )


def assert_packed(found: SimpleNamespace, expected: SimpleNamespace, what: str) -> None:
    assert_same(found.scales, expected.scales, f"{what} scales")
    assert_same(found.data, expected.data, f"{what} data")


def every_finite(type_name: str, columns: int) -> list[Array]:
    """All finite weights of 16 bits, in order and in another."""
    every = np.arange(2**16, dtype=np.uint16).view(TYPES[type_name])
    finite = every[np.isfinite(every.astype(np.float32))]
    return [weights.reshape(-1, columns) for weights in (finite, np.random.default_rng(0).permutation(finite))]


# --- modelopt ------------------------------------------------------------------------------------


@type_names
def test_stored_modelopt_vectors(type_name: str) -> None:
    stored = np.load(GOLDEN)
    assert str(stored["modelopt"]) == "0.47.0"
    names = [name for name in stored if name.startswith(f"{type_name}.") and name.count(".") == 1]
    assert len(names) == 8
    for name in names:
        weights = stored[name]
        amax = _C.amax(weights)
        fp8 = {key: stored[f"{name}.fp8.{key}"] for key in ("weight", "weight_scale")}
        assert fp8_scale(amax) == fp8["weight_scale"]
        assert_same(pack_fp8(weights, fp8_scale(amax)), fp8["weight"], f"{name} fp8")
        assert nvfp4_scale_2(amax) == stored[f"{name}.nvfp4.weight_scale_2"]
        nvfp4 = pack_nvfp4(weights, nvfp4_scale_2(amax))
        assert_same(nvfp4.scales, stored[f"{name}.nvfp4.weight_scale"], f"{name} scales")
        assert_same(nvfp4.data, stored[f"{name}.nvfp4.weight"], f"{name} data")


# --- the formulas --------------------------------------------------------------------------------


@type_names
@pytest.mark.parametrize("shape", [(1, 16), (3, 80), (7, 528), (130, 112), (1, 4112)])
def test_formula_on_irregular_shapes(shape: tuple[int, int], type_name: str) -> None:
    for name, weights in typed_cases(*shape, type_name).items():
        amax = _C.amax(raw(weights))
        assert amax == np.abs(weights.astype(np.float32)).max()
        # The row's own range; a wider one shared with a fused neighbour; one so narrow that most values saturate.
        for factor in (1, 3, 0.01):
            scale = max(fp8_scale(amax * factor), np.float32(1e-45))
            assert_same(pack_fp8(weights, scale), fp8_formula(weights, scale), f"{name} {factor}")
            scale_2 = max(nvfp4_scale_2(amax * factor), np.float32(1e-45))
            assert_packed(pack_nvfp4(weights, scale_2), nvfp4_formula(weights, scale_2), f"{name} {factor}")


@type_names
@pytest.mark.parametrize("shape", [(2, 32), (6, 96), (130, 544), (2, 8224)])
def test_int4_formula_on_irregular_shapes(shape: tuple[int, int], type_name: str) -> None:
    for name, weights in typed_cases(*shape, type_name).items():
        assert_packed(pack_int4(weights), packed_int4_formula(weights), name)


@pytest.mark.parametrize("type_name", ["bf16", "f16"])
def test_int4_of_every_finite_16_bit_weight(type_name: str) -> None:
    for matrix in every_finite(type_name, 32):
        assert_packed(pack_int4(matrix), packed_int4_formula(matrix), "int4")


def test_int4_codes_ties_and_nibble_order_by_hand() -> None:
    # 7 in a block whose other weights are integers makes the scale 1: nothing is lost.
    rows = np.zeros((2, 32), np.float32)
    rows[0, :9] = [7, -7, 0.5, 1.5, -0.5, -1.5, -0.0, 3, -1]
    rows[0, 2:6] = [2, -2, 4, -4]
    rows[1, :3] = [-8, 7, 1]  # eight below 0 and seven above it: the scale of the last step loses nothing
    packed = pack_int4(rows)
    assert packed.scales.tolist() == [[1], [1]]
    low = [7, 9, 2, 14, 4, 12, 0, 3, 15]
    high = [8, 7, 1]
    assert packed.data[0, :9].tolist() == [lo | (high[i] if i < 3 else 0) << 4 for i, lo in enumerate(low)]
    assert not packed.data[0, 9:].any()


@pytest.mark.parametrize("type_name", ["bf16", "f16"])
@pytest.mark.parametrize("scale", [1e-44, 2.0**-120, 3e-6, 0.0123, 1.0, 7.7, 2.0**114, 3e38])
def test_every_finite_16_bit_weight(type_name: str, scale: float) -> None:
    for matrix in every_finite(type_name, 16):
        assert_same(pack_fp8(matrix, scale), fp8_formula(matrix, np.float32(scale)), f"fp8 {scale}")
        assert_packed(pack_nvfp4(matrix, scale), nvfp4_formula(matrix, np.float32(scale)), f"nvfp4 {scale}")


@pytest.mark.parametrize("columns", [1, 15, 17, 63, 65, 127, 129, 1000])
def test_fp8_takes_any_width(columns: int) -> None:
    for type_name in TYPES:
        weights = np.random.default_rng(columns).standard_normal((3, columns)).astype(TYPES[type_name])
        scale = fp8_scale(_C.amax(raw(weights)))
        assert_same(pack_fp8(weights, scale), fp8_formula(weights, scale), type_name)


# --- hand-computed -------------------------------------------------------------------------------


def test_codes_ties_nibble_order_and_saturation() -> None:
    # The block's 6 and scale_2 = 1 give block scale 1: quotients are the weights.
    row = [0.25, -0.25, 0.75, 1.25, 1.75, -2.5, 3.5, 5, -5.25, 6, 0.5, -0.0, 0, -0.1, 1, -6]
    codes = [0, 8, 2, 2, 4, 12, 6, 6, 15, 7, 1, 0, 0, 8, 2, 15]
    packed = pack_nvfp4(np.array([row], np.float32), 1.0)
    assert packed.scales.tolist() == [[0x38]]
    assert packed.data.tolist() == [[even | odd << 4 for even, odd in zip(codes[::2], codes[1::2], strict=True)]]
    row = [0, -0.0, 2**-10, 1.5 * 2**-9, 2**-6, 1.0625, 1.1875, 448, 464, -1e30, 3.4e38]
    expected = [0, 0x80, 0, 2, 8, 0x38, 0x3A, 0x7E, 0x7E, 0xFE, 0x7E]
    assert pack_fp8(np.array([row], np.float32), 1.0).tolist() == [expected]


def test_rounding_and_underflow_by_hand() -> None:
    # 1.0625 is halfway between two e4m3 values; bfloat16 rounds a little more than that onto it.
    quotient = 1.0625 + 2.0**-12
    weights, scale = np.array([[1.0]], ml_dtypes.bfloat16), 1 / quotient
    assert pack_fp8(weights, scale).tolist() == [[0x38]]
    assert pack_fp8(weights.astype(np.float32), scale).tolist() == [[0x39]]
    weights = np.full((1, 48), 2.0**-12, np.float32)
    weights[0, 16:32] = 0
    weights[0, 32:] = 2.0**-140
    packed = pack_nvfp4(weights, 1.0)
    assert packed.scales.tolist() == [[0x01, 0x38, 0x01]]
    assert packed.data.tolist() == [[0] * 24]  # 2^-12 / 2^-9 = 0.125
    # 2^-140 / 6e30 is 0 in float32, and so a scale of 1.
    assert pack_nvfp4(weights, 1e30).scales.tolist() == [[0x01, 0x38, 0x38]]
    # scale * scale_2 is 0 in float32: quotients are infinite, and NaN for weights of 0. All decode to 0.
    weights = np.zeros((16, 16), np.float32)
    weights[:, 0], weights[:, 2] = 1e-45, -1e-45
    packed = pack_nvfp4(weights, 1e-45)
    assert packed.scales.tolist() == [[0x23]] * 16
    assert packed.data.tolist() == [[0x77, 0x7F, 0x77, 0x77, 0x77, 0x77, 0x77, 0x77]] * 16


@type_names
def test_all_zero_weights_pack_to_zeros(type_name: str) -> None:
    weights = np.zeros((5, 48), TYPES[type_name])
    assert _C.amax(raw(weights)) == 0
    assert not pack_fp8(weights, 1.0).any()
    packed = pack_nvfp4(weights, 1.0)
    assert not packed.data.any()
    assert (packed.scales == 0x38).all()  # 1.0, modelopt's scale for a block of zeros
    packed = pack_int4(np.zeros((6, 96), TYPES[type_name]))
    assert not packed.data.any()
    assert (packed.scales == 1).all()


# --- execution -----------------------------------------------------------------------------------


@type_names
def test_bytes_do_not_depend_on_threads(type_name: str) -> None:
    weights = typed_cases(301, 1616, type_name)["heavy"]
    amax = _C.amax(raw(weights), threads=1)
    fp8 = pack_fp8(weights, fp8_scale(amax), threads=1)
    nvfp4 = pack_nvfp4(weights, nvfp4_scale_2(amax), threads=1)
    pairs = typed_cases(300, 1600, type_name)["heavy"]
    int4 = pack_int4(pairs, threads=1)
    for threads in (0, 2, 3, 7, 64):
        assert _C.amax(raw(weights), threads=threads) == amax
        assert_same(pack_fp8(weights, fp8_scale(amax), threads=threads), fp8, "fp8")
        assert_packed(pack_nvfp4(weights, nvfp4_scale_2(amax), threads=threads), nvfp4, "nvfp4")
        assert_packed(pack_int4(pairs, threads=threads), int4, "int4")


@type_names
def test_read_only_memory_map_at_an_odd_offset(type_name: str, tmp_path: Path) -> None:
    weights = typed_cases(4, 320, type_name)["normal"]
    path = tmp_path / "weights"
    path.write_bytes(b"\0" + weights.tobytes())
    mapped = np.memmap(path, raw(weights).dtype, mode="r", offset=1, shape=weights.shape)
    amax = _C.amax(mapped)
    scale, scale_2 = fp8_scale(amax), nvfp4_scale_2(amax)
    assert_same(pack_fp8(mapped, scale), pack_fp8(weights, scale), "fp8")
    assert_same(pack_nvfp4(mapped, scale_2).data, pack_nvfp4(weights, scale_2).data, "nvfp4")


# --- errors --------------------------------------------------------------------------------------


@type_names
@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (-np.inf, "infinity")])
@pytest.mark.parametrize("index", [0, 100, 64 * 2064 - 1])
def test_non_finite_weights_are_named(type_name: str, value: float, word: str, index: int) -> None:
    weights = np.full((64, 2064), 0.5, TYPES[type_name])
    weights.reshape(-1)[index:] = value
    row, column = divmod(index, 2064)
    expected = rf"expected finite weights, found {word} at flat index {index} \(row {row}, column {column}\)"
    with pytest.raises(_C.NonFiniteError, match=expected):
        _C.amax(raw(weights))
    with pytest.raises(_C.NonFiniteError, match=expected):
        pack_fp8(weights, 1.0)
    with pytest.raises(_C.NonFiniteError, match=expected):
        pack_nvfp4(weights, 1.0)
    whole = np.pad(weights, ((0, 0), (0, 16)), mode="edge")[:, :2080]
    with pytest.raises(_C.NonFiniteError, match=f"expected finite weights, found {word} at flat index"):
        pack_int4(whole)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-50])
def test_scale_must_be_positive_and_finite(scale: float) -> None:
    weights = np.ones((2, 16), np.float32)
    with pytest.raises(ValueError, match="expected a positive finite scale, found"):
        pack_fp8(weights, scale)
    with pytest.raises(ValueError, match="expected a positive finite scale_2, found"):
        pack_nvfp4(weights, scale)


def test_arguments_must_fit() -> None:
    with pytest.raises(ValueError, match=r"multiples of 16, the NVFP4 block, found 40 = 16 \* 2 \+ 8"):
        pack_nvfp4(np.ones((2, 40), np.float32), 1.0)
    with pytest.raises(ValueError, match=r"multiples of 32, the INT4 block, found 48 = 32 \* 1 \+ 16"):
        pack_int4(np.ones((2, 48), np.float32))
    with pytest.raises(ValueError, match="expected an even number of rows, as two share a byte, found 3"):
        pack_int4(np.ones((3, 32), np.float32))
    with pytest.raises(ValueError, match=r"expected out_data of shape \[1, 32\], found \[2, 32\]"):
        _C.pack_int4(np.ones((2, 32), np.float32), np.zeros((2, 32), np.uint8), np.zeros((2, 1), np.float32))
    with pytest.raises(ValueError, match=r"expected out_scales of shape \[2, 1\], found \[1, 1\]"):
        _C.pack_int4(np.ones((2, 32), np.float32), np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.float32))
    weights = np.ones((2, 32), np.float32)
    data, scales = np.zeros((2, 16), np.uint8), np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match=r"expected out of shape \[2, 32\], found \[2, 16\]"):
        _C.pack_fp8(weights, 1.0, data)
    with pytest.raises(ValueError, match=r"expected out_data of shape \[2, 16\], found \[2, 2\]"):
        _C.pack_nvfp4(weights, 1.0, scales, scales)
    with pytest.raises(ValueError, match=r"expected out_scales of shape \[2, 2\], found \[2, 16\]"):
        _C.pack_nvfp4(weights, 1.0, data, data)
    with pytest.raises(TypeError, match=r"expected weights of type uint16 .*, float16 or float32"):
        _C.amax(np.ones((2, 16)))
    weights = np.ones((2, 16), np.float32)
    with pytest.raises(ValueError, match="expected threads >= 0"):
        _C.amax(weights, threads=-1)


def test_empty_arrays_and_those_that_would_need_a_copy() -> None:
    weights = np.ones((32, 32), np.float32)
    with pytest.raises(TypeError):
        _C.amax(weights[:, ::2])
    with pytest.raises(TypeError):
        _C.pack_fp8(weights, 1.0, np.zeros((32, 64), np.uint8)[:, ::2])
    read_only = np.zeros((32, 32), np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        _C.pack_fp8(weights, 1.0, read_only)
    empty = np.zeros((0, 32), np.float32)
    assert _C.amax(empty) == 0
    assert pack_fp8(empty, 1.0).shape == (0, 32)
    assert pack_nvfp4(empty, 1.0).data.shape == (0, 16)
    assert pack_int4(empty).data.shape == (0, 32)
