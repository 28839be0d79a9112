# SPDX-License-Identifier: Apache-2.0
"""Greedy choices and which proposals equal them, against their definitions."""

from __future__ import annotations

import ast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt import _C
from dflash_trt._C import accept_greedy, argmax_and_finite
from tests.paths import REPOSITORY

TOKENS = st.integers(0, 3)  # few, so that long prefixes agree


def definition(proposals: list[int], verified: list[int]) -> int:
    for position, proposal in enumerate(proposals):
        if proposal != verified[position]:
            return position
    return len(proposals)


@given(
    st.lists(TOKENS, max_size=31).flatmap(
        lambda proposals: st.tuples(
            st.just(proposals), st.lists(TOKENS, min_size=len(proposals) + 1, max_size=len(proposals) + 1)
        )
    )
)
def test_it_is_the_longest_common_prefix(case: tuple[list[int], list[int]]) -> None:
    proposals, verified = case
    assert accept_greedy(proposals, verified) == definition(proposals, verified)


@pytest.mark.parametrize("length", [0, 1, 7])
def test_all_accepted(length: int) -> None:
    assert accept_greedy([5] * length, [5] * length + [9]) == length


@pytest.mark.parametrize(("proposals", "verified"), [([], []), ([1], [1]), ([1], [1, 2, 3])])
def test_lengths_must_fit(proposals: list[int], verified: list[int]) -> None:
    with pytest.raises(ValueError, match=f"expected .* \\({len(proposals) + 1}\\), found {len(verified)}"):
        accept_greedy(proposals, verified)


@given(st.integers(1, 3000), st.integers(1, 3), st.integers(0, 2**32), st.sampled_from(["float32", "bfloat16"]))
def test_the_argmax_is_the_first_of_the_largest(vocab: int, rows: int, seed: int, dtype: str) -> None:
    """As numpy's argmax has it; in few values, so that many are equal, with a NaN and infinities here and there."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 3, (rows, vocab)).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf):
        logits[rng.random(rows) < 0.2] = -np.inf
        logits[rng.integers(rows), rng.integers(vocab)] = value if rng.random() < 0.5 else 3.0
    stored = logits if dtype == "float32" else (logits.view(np.uint32) >> 16).astype(np.uint16)
    tokens, are_finite = argmax_and_finite(stored)
    assert tokens == logits.argmax(axis=-1).tolist()
    assert are_finite == np.isfinite(logits[np.arange(rows), tokens]).tolist()


def test_a_row_without_logits_has_no_argmax() -> None:
    with pytest.raises(ValueError, match="expected a logit at least in each row, found none"):
        argmax_and_finite(np.empty((2, 0), np.float32))
    assert argmax_and_finite(np.empty((0, 5), np.float32)) == ([], [])


def test_the_stub_names_what_the_module_has() -> None:
    """dflash_trt/_C.pyi is written by hand."""
    stub = ast.parse((REPOSITORY / "dflash_trt" / "_C.pyi").read_text())
    described = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    constants = {ast.unparse(node.target) for node in stub.body if isinstance(node, ast.AnnAssign)}
    described |= {name for name in constants if not name.startswith("_")}
    assert described == {name for name in dir(_C) if not name.startswith("__")}
