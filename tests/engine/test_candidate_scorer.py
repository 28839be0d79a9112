# SPDX-License-Identifier: Apache-2.0
"""Logits of candidates."""

from __future__ import annotations

from pathlib import Path

import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.candidate_scorer import CandidateSelector
from tests.oracle.zlab_dflash2 import CASES


def test_logits_are_multiplied_and_then_capped(tmp_path: Path) -> None:
    """By 0.7 near 0, at 3 far from it: a path seldom depends on it."""
    selector = CandidateSelector(read_draft(CASES[3].write(tmp_path)).spec, *torch.zeros(3, 1, 1))
    logits = selector.final_logits(torch.tensor([-1e3, -1e-3, 1e-3, 1e3]))
    torch.testing.assert_close(logits, torch.tensor([-3.0, -0.7e-3, 0.7e-3, 3.0]))
