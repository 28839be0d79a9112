# SPDX-License-Identifier: Apache-2.0
"""The compiled attention operator against float64 equations, on every instruction set that this machine has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from dflash_trt import _C
from tests.plugins.cases import CORNER, FEATURES, REGULAR, Case
from tests.plugins.compare import assert_close
from tests.plugins.kernel.oracle import expect
from tests.plugins.onnx_node import INTEGERS, feeds_of, run
from tests.plugins.tensors import draw
from tests.plugins.test_reference import as_carried, random_case

FLOAT32 = 2e-5  # of the values' size: the sums' rounding, and that of scores in the hundreds
ISAS = _C.cpu_features()
CASES = [case for case in (*REGULAR, *FEATURES, *CORNER) if case.B and max(case.context_lengths) < 10_000]
SEEDS = range(40)


def compare(case: Case, isa: str) -> None:
    expected = expect(as_carried(case), draw(case)).output
    actual = torch.from_numpy(run(case, feeds_of(case, draw(case)), isa)).double()
    assert_close(actual, expected, FLOAT32 * expected.abs().max() * torch.ones_like(expected))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
    """[B, M] with pages of 32 rows; entries behind a context's own are never looked at."""
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
def test_what_does_not_fit_is_refused(name: str, value: object, expected: str) -> None:
    feeds = feeds_of(PAGED, draw(PAGED)) | {name: np.array(value, dtype=np.int32)}
    with pytest.raises(ort_errors.InvalidArgument, match=expected):
        run(PAGED, feeds, "best")


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ort_errors.RuntimeException, match="found mmx"):
        run(PAGED, feeds_of(PAGED, draw(PAGED)), isa="mmx")
