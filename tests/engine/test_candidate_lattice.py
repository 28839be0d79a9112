# SPDX-License-Identifier: Apache-2.0
"""Logits of candidates, and walks through their lattice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.candidate_lattice import CandidateLattice
from dflash_trt.engine.candidate_scorer import CandidateSelector
from tests.oracle.zlab_dflash2 import CASES


def test_logits_are_multiplied_and_then_capped(tmp_path: Path) -> None:
    """By 0.7 near 0, at 3 far from it: a path seldom depends on it."""
    selector = CandidateSelector(read_draft(CASES[3].write(tmp_path)).spec, *torch.zeros(3, 1, 1))
    logits = selector.final_logits(torch.tensor([-1e3, -1e-3, 1e-3, 1e3]))
    torch.testing.assert_close(logits, torch.tensor([-3.0, -0.7e-3, 0.7e-3, 3.0]))


def test_the_walk_draws_after_what_it_drew() -> None:
    """Every number on a fine grid, so that shares are the probabilities."""
    count, generator = 4000, torch.Generator().manual_seed(0)
    lattice = CandidateLattice(
        torch.tensor([[[10, 11, 12], [20, 21, 22]]]).expand(count, -1, -1),
        torch.randn(1, 2, 3, 3, generator=generator).expand(count, -1, -1, -1),
    )
    grid = (torch.arange(count) + 0.5) / count
    temperatures = torch.full((count,), 0.8, dtype=torch.float64)
    for drawn_first in (0, 1, 2):
        first = lattice.scores[0, 0, 0].double().div(0.8).softmax(-1)
        u = first[:drawn_first].sum() + 0.5 * first[drawn_first]
        paths, q = lattice.sampled_walk(temperatures, torch.stack([u.expand(count), grid], dim=1))
        second = lattice.scores[0, 1, drawn_first].double().div(0.8).softmax(-1)
        torch.testing.assert_close(q[0], torch.stack([first, second]))
        assert set(paths[:, 0].tolist()) == {10 + drawn_first}
        torch.testing.assert_close(paths[:, 1].sub(20).bincount() / count, second.float(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("scores", [float("nan"), float("inf"), float("-inf"), 1e38])
def test_a_broken_draft_draws_from_a_distribution(scores: float) -> None:
    lattice = CandidateLattice(torch.arange(6).view(1, 2, 3), torch.full((1, 2, 3, 3), scores))
    _, q = lattice.sampled_walk(torch.tensor([1e-30]), torch.tensor([[0.5, 1 - 2**-53]], dtype=torch.float64))
    torch.testing.assert_close(q.sum(-1), torch.ones(1, 2, dtype=torch.float64))
