# SPDX-License-Identifier: Apache-2.0
"""The CPU reference against ONNX Runtime's operator, float64 equations in torch, and values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.plugins.cases import BF16, CORNER, EPS, F16, FEATURES, FP8, PAGED, PERFORMANCE, REGULAR, Case
from tests.plugins.compare import assert_close, rounding
from tests.plugins.kernel.oracle import expect
from tests.plugins.onnx_node import feeds_of, run
from tests.plugins.tensors import Tensors, draw, reference

D = 64
ONE = Case(name="one", S=1, N=1, G=1, D=D, context_lengths=(0,))


def blank(case: Case) -> Tensors:
    """All zero, cos 1 and sin 0, norms 1: scores are 0 and every visible row weighs the same."""
    tensors = draw(case)
    for tensor in (tensors.qkv, tensors.rope):
        tensor.zero_()
    for tensor in (tensors.q_norm, tensors.k_norm):
        tensor.fill_(1)
    for tensor in (tensors.k_cache, tensors.v_cache):
        tensor.copy_(torch.zeros(tensor.shape))
    tensors.rope[..., : case.D // 2] = 1
    return tensors


def test_values_of_one_and_of_equal_keys() -> None:
    """v is neither normed nor rotated."""
    tensors = draw(ONE)
    assert torch.equal(reference(ONE, tensors), tensors.v)
    case = replace(ONE, S=2, context_lengths=(3,))
    tensors = blank(case)
    tensors.v_cache[0, 0, :, 0] = torch.tensor([1.0, 2.0, 3.0])[:, None]
    tensors.v[0, :, :] = torch.tensor([10.0, 24.0])[:, None]
    assert (reference(case, tensors) == (1 + 2 + 3 + 10 + 24) / 5).all()
    case = replace(ONE, context_lengths=(1,), cache_dtype=FP8, v_scale=1e4, dtype=F16)
    tensors = blank(case)
    tensors.v_cache.copy_(torch.full(tensors.v_cache.shape, 448.0))
    assert torch.isposinf(reference(case, tensors)).all()


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_output_is_rounded_to_nearest_even(dtype: torch.dtype) -> None:
    """Two equal scores: the mean of 1 and 1 + n units lies halfway between two numbers where n is odd."""
    case = replace(ONE, context_lengths=(1,), dtype=dtype, cache_dtype=dtype)
    tensors = blank(case)
    unit = torch.finfo(dtype).eps
    tensors.v_cache.fill_(1)
    steps = torch.arange(D)
    tensors.v.copy_((1 + steps * unit).view(1, 1, D))
    halves = steps.double() / 2
    expected = (1 + torch.round(halves) * unit).to(dtype)  # torch.round: half to even
    assert torch.equal(reference(case, tensors)[0, 0], expected)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_number_of_the_block_passes_through(dtype: torch.dtype) -> None:
    """One key: the value's bits come out as they went in, subnormal numbers and infinities included."""
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    values = values[~values.isnan()]
    values = torch.cat([values, values.new_zeros(-len(values) % D)])
    case = replace(ONE, N=len(values) // D // 8, G=len(values) // D // 8, S=8, window=1, dtype=dtype, cache_dtype=dtype)
    tensors = blank(case)
    count = tensors.v.numel()
    tensors.v.copy_(values[:count].view(tensors.v.shape))
    assert torch.equal(reference(case, tensors), tensors.v)
    assert count > 2**16 - 2**12  # 2046 of FP16's 2^16 codes are NaN


def test_every_fp8_code_times_its_scale() -> None:
    """A cache row of zero score beside a block row of value 0: half the row comes out."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # NaN
    for begin in range(0, 256 - D, D - 1):
        case = replace(ONE, context_lengths=(1,), cache_dtype=FP8, v_scale=0.5)
        tensors = blank(case)
        some = codes[begin : begin + D].view(FP8)
        tensors.v_cache[0, 0, 0, 0, : len(some)] = some
        assert torch.equal(reference(case, tensors)[0, 0, : len(some)], (some.float() * 0.25).to(BF16))


@pytest.mark.parametrize(
    ("window", "causal", "first", "last"),
    [
        # positions 0 to 3 are context, 4 to 6 the block; row j has value 2^j
        (0, False, 0b1111111, 0b1111111),
        (0, True, 0b0011111, 0b1111111),
        (1, False, 0b0010000, 0b1000000),
        (2, False, 0b0111000, 0b1100000),
        (3, True, 0b0011100, 0b1110000),
        (4, False, 0b1111110, 0b1111000),
        (5, False, 0b1111111, 0b1111100),
        (5, True, 0b0011111, 0b1111100),
        (100, False, 0b1111111, 0b1111111),
    ],
)
def test_what_the_window_and_causality_leave(window: int, causal: bool, first: int, last: int) -> None:
    """Visible is |q - k| < window, and k <= q if causal."""
    case = replace(ONE, S=3, context_lengths=(4,), window=window, causal=causal)
    tensors = blank(case)
    powers = 2.0 ** torch.arange(7)
    tensors.v_cache[0, 0, :, 0] = powers[:4, None].to(BF16)
    tensors.v[0] = powers[4:, None].to(BF16)
    out = reference(case, tensors)
    for slot, visible in ((0, first), (2, last)):
        assert out[0, slot, 0] == torch.tensor(visible / visible.bit_count()).to(BF16)


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    """Five equal scores of 0 and a sink of log 3: each key weighs 1/8."""
    case = replace(ONE, context_lengths=(4,), N=2, G=1, sinks=True)
    tensors = blank(case)
    assert tensors.sinks is not None
    tensors.sinks.copy_(torch.tensor([math.log(3), -torch.inf]))
    tensors.v_cache.fill_(16)
    tensors.v.fill_(16)
    out = reference(case, tensors).view(2, D)
    assert (out[0] == 10).all()
    assert (out[1] == 16).all()


def scored(case: Case, q: float, k: float) -> float:
    """The output of a query whose context row has value 1 and whose own has value 0: the row's weight."""
    tensors = blank(case)
    tensors.q.fill_(q)
    tensors.k_cache.copy_(torch.full(tensors.k_cache.shape, k))
    tensors.v_cache.copy_(torch.ones(tensors.v_cache.shape))
    return float(reference(case, tensors)[0, 0, 0])


def weight(score: float) -> float:
    """The softmax of [score, 0], rounded as the output is."""
    return float(torch.tensor(1 / (1 + math.exp(-score)), dtype=torch.float64).to(BF16))


def test_the_score_of_a_context_row() -> None:
    """q = 2 everywhere: normed 1 / sqrt(1 + eps/4), times k = 0.25 over 64 coordinates, times 1/8."""
    case = replace(ONE, context_lengths=(1,))
    assert scored(case, q=2.0, k=0.25) == weight(64 * 0.25 / 8 / math.sqrt(1 + EPS / 4))
    assert scored(replace(case, softmax_scale=0.5), q=2.0, k=0.25) == weight(64 * 0.25 / 2)
    assert scored(replace(case, cache_dtype=FP8, k_scale=3.0), q=2.0, k=0.25) == weight(64 * 0.75 / 8)
    # q = 1/1024: its mean square is 2^-20, about eps, so the norm is 1 / sqrt(1 + eps 2^20)
    assert scored(replace(ONE, context_lengths=(1,)), q=2.0**-10, k=0.5) == weight(4 / math.sqrt(1 + EPS * 2**20))


def test_norms_scale_and_rotations_turn_q_and_k_of_the_block() -> None:
    """Slot 1's query and slot 0's key, zero but for one of the coordinates 0 and 32, which turn together.

    The query (4, 0) is normed to (8, 0), scaled by q_norm to (4, 0) and turned by slot 1's 90 degrees to (0, 4).
    The key (0, 16) is normed to (0, 8), scaled by k_norm to (0, 2) and not turned: the score is 4 * 2 / 8.
    """
    case = replace(ONE, S=2)
    tensors = blank(case)
    tensors.q[0, 1, 0] = 4.0
    tensors.k[0, 0, 32] = 16.0
    tensors.q_norm.fill_(0.5)
    tensors.k_norm.fill_(0.25)
    tensors.rope[0, 1, 0], tensors.rope[0, 1, 32] = 0.0, 1.0
    tensors.v[0, 0] = 1
    assert float(reference(case, tensors)[0, 1, 0]) == weight(1.0)


def test_heads_slots_and_layers() -> None:
    case = replace(ONE, N=6, G=2)
    tensors = blank(case)
    tensors.v[0, 0, :D], tensors.v[0, 0, D:] = 1, 2
    assert reference(case, tensors).view(6, D)[:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    case = replace(ONE, context_lengths=(1, 1), slots=3, slot_ids=(2, 0), L=4, layer=3)
    tensors = blank(case)
    tensors.v_cache[..., 0] = torch.arange(12.0).view(3, 4, 1, 1).to(BF16)
    assert reference(case, tensors)[:, 0, 0].tolist() == [11 / 2, 3 / 2]
    case = replace(ONE, context_lengths=(2,), C_max=3, window=2)
    tensors = blank(case)
    tensors.k_cache[0, 0, [0, 2]] = torch.nan
    assert not reference(case, tensors).isnan().any()
    tensors.k_cache[0, 0, 1, 0, 5] = torch.nan
    assert reference(case, tensors).isnan().all()


CASES = [*REGULAR, *FEATURES, *CORNER, *PAGED]
ONNX_CASES = [case for case in CASES if case.B and max(case.context_lengths) < 10_000]
FLOAT32 = 1e-5  # relative error of ONNX Runtime's FP32 sums


def named(case: Case) -> str:
    return case.name


def test_the_names_are_unique() -> None:
    names = [case.name for case in (*CASES, *PERFORMANCE)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in ONNX_CASES or not case.B else pytest.mark.full) for case in CASES],
    ids=named,
)
def test_against_float64(case: Case) -> None:
    tensors = draw(case)
    expected = expect(as_carried(case), tensors).output
    # Float64 on both sides: what is left is the rounding of the output, and its ties.
    assert_close(reference(case, tensors), expected, 1.0001 * rounding(expected, case.out_dtype) + 1e-11)


def as_carried(case: Case) -> Case:
    """The case with its attributes rounded to FP32, as a node carries them."""
    scales = {name: getattr(case, name) for name in ("k_scale", "v_scale", "output_scale")}
    scales["softmax_scale"] = case.attributes()["softmax_scale"]
    return replace(case, **{name: float(np.float32(value)) for name, value in scales.items()})


@pytest.mark.parametrize("case", ONNX_CASES, ids=named)
def test_against_the_onnx_function(case: Case) -> None:
    compare_with_onnx(case)


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(8, 40))])
def test_random_cases_against_the_onnx_function(seed: int) -> None:
    compare_with_onnx(random_case(seed))


def random_case(seed: int) -> Case:
    """Any sizes and attributes that the plugin takes, small enough for a test."""
    draw_from = np.random.default_rng(seed)

    def one(*values: int) -> int:
        return int(draw_from.choice(values))

    window = one(0, 0, 1, 2, 9, 40)
    lengths = [one(0, 1, 2, 13, 50, max(window - 1, 0), window, window + 1) for _ in range(one(1, 2, 5))]
    slots, layers, G = len(lengths) + one(0, 3), one(1, 2, 4), one(1, 2, 3)
    return Case(
        name=f"random-{seed}", S=one(1, 2, 3, 7, 16, 32), N=G * one(1, 2, 5, 8), G=G, D=one(64, 96, 128, 256), L=layers,
        C_max=max(1, *lengths) + one(0, 1, 30), context_lengths=tuple(lengths), slots=slots,
        slot_ids=tuple(int(slot) for slot in draw_from.permutation(slots)[: len(lengths)]), layer=one(*range(layers)),
        window=window, causal=bool(one(0, 1)), sinks=bool(seed % 3 == 0),
        rope_factor=float(draw_from.choice([1.0, 1.3466])), seed=seed, bias=bool(seed % 2),
        output_scale=0.01 * (seed % 5 == 0),
    )  # fmt: skip


def compare_with_onnx(case: Case) -> None:
    tensors = draw(case)
    expected = torch.from_numpy(run_onnx(case, tensors)) / (case.output_scale or 1)
    if case.output_scale:
        expected = expected.clamp(-448, 448)
    error = FLOAT32 * float(expected.abs().max())
    assert_close(reference(case, tensors), expected, rounding(expected.abs() + error, case.out_dtype) + error)


def run_onnx(case: Case, tensors: Tensors) -> np.ndarray:
    """The node as the CPU's operator computes it, in FP32."""
    feeds = feeds_of(case, tensors)
    # Rows beyond a request's own context, yet within the longest, are masked in ONNX, and a mask does not stop a NaN.
    for name in ("k_cache", "v_cache"):
        feeds[name] = np.nan_to_num(feeds[name])
    return run(replace(case, k_scale=1.0, v_scale=1.0), feeds)
