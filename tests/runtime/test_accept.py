# SPDX-License-Identifier: Apache-2.0
"""Greedy choices and which proposals equal them, against their definitions."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.runtime.accept import argmax, argmax_and_finite, num_equal

TOKENS = st.integers(0, 3)  # few, so that long prefixes agree


def definition(proposals: list[int], verified: list[int]) -> int:
    for position, proposal in enumerate(proposals):
        if proposal != verified[position]:
            return position
    return len(proposals)


@given(
    st.integers(0, 31).flatmap(
        lambda n: st.tuples(st.lists(TOKENS, min_size=n, max_size=n), st.lists(TOKENS, min_size=n + 1, max_size=n + 1))
    )
)
def test_it_is_the_longest_common_prefix(case: tuple[list[int], list[int]]) -> None:
    proposals, verified = case
    assert num_equal(proposals, verified) == definition(proposals, verified)


def first_of_the_largest(row: list[float]) -> int:
    """A NaN is larger than all."""
    for place, value in enumerate(row):
        if math.isnan(value):
            return place
    return row.index(max(row))


@given(st.integers(1, 300), st.integers(1, 3), st.integers(0, 2**32), st.sampled_from(["float32", "bfloat16"]))
def test_the_choice_is_the_first_of_the_largest(vocab: int, rows: int, seed: int, dtype: str) -> None:
    """In few values, so that many are equal, with a NaN and infinities here and there."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 3, (rows, vocab)).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf):
        logits[rng.random(rows) < 0.2] = -np.inf
        logits[rng.integers(rows), rng.integers(vocab)] = value if rng.random() < 0.5 else 3.0
    expected = [first_of_the_largest(row.tolist()) for row in logits]
    tensor = torch.from_numpy(logits).to(getattr(torch, dtype))
    tokens, are_finite = argmax_and_finite(tensor)
    assert tokens == argmax(tensor) == expected
    assert are_finite == [bool(np.isfinite(row[token])) for row, token in zip(logits, expected, strict=True)]


def test_no_rows_have_no_choices() -> None:
    assert argmax_and_finite(torch.empty(0, 5)) == ([], [])
