# SPDX-License-Identifier: Apache-2.0
"""The CPU reference against two other statements of the same: the ONNX function, and float64 equations in torch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.plugins.calls import reference
from tests.plugins.cases import CORNER, FEATURES, PAGED, PERFORMANCE, REGULAR, Case
from tests.plugins.compare import assert_close, rounding
from tests.plugins.kernel.oracle import expect
from tests.plugins.onnx_node import feeds_of, run
from tests.plugins.tensors import Tensors, draw

CASES = [*REGULAR, *FEATURES, *CORNER, *PAGED]
# The ONNX function's tensor of scores would fill the memory.
ONNX_CASES = [case for case in CASES if case.B and max(case.context_lengths) < 10_000]
FLOAT32 = 1e-5  # of the values' size: what ONNX Runtime's FP32 sums may be off


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
    assert_close(reference(case, tensors), expected, 1.0001 * rounding(expected, case.dtype) + 1e-11)


def as_carried(case: Case) -> Case:
    """The case with its attributes rounded to FP32, as a node carries them."""
    scales = {"softmax_scale": case.attributes()["softmax_scale"], "k_scale": case.k_scale, "v_scale": case.v_scale}
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
        name=f"random-{seed}",
        S=one(1, 2, 3, 7, 16, 32),
        N=G * one(1, 2, 5, 8),
        G=G,
        D=one(64, 96, 128, 256),
        L=layers,
        C_max=max(1, *lengths) + one(0, 1, 30),
        context_lengths=tuple(lengths),
        slots=slots,
        slot_ids=tuple(int(slot) for slot in draw_from.permutation(slots)[: len(lengths)]),
        layer=one(*range(layers)),
        window=window,
        causal=bool(one(0, 1)),
        sinks=bool(seed % 3 == 0),
        rope_factor=float(draw_from.choice([1.0, 1.3466])),
        seed=seed,
    )


def compare_with_onnx(case: Case) -> None:
    tensors = draw(case)
    expected = torch.from_numpy(run_onnx(case, tensors))
    size = float(expected.abs().max())
    assert_close(reference(case, tensors), expected, rounding(expected, case.dtype) + FLOAT32 * size)


def run_onnx(case: Case, tensors: Tensors) -> np.ndarray:
    """The node's function in FP32."""
    feeds = feeds_of(case, tensors)
    # Rows beyond a request's own context, yet within the longest, are masked in ONNX, and a mask does not stop a NaN.
    for name in ("k_cache", "v_cache"):
        feeds[name] = np.nan_to_num(feeds[name])
    return run(replace(case, k_scale=1.0, v_scale=1.0), feeds)
