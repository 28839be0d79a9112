# SPDX-License-Identifier: Apache-2.0
"""The candidate scorer of an engine directory, whichever kind its draft has."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.candidate_scorer import CandidateScorer, CandidateSelector
from dflash_trt.engine.executor import Executor
from dflash_trt.engine.lilicorr_scorer import LilicorrScorer
from dflash_trt.engine.markov_scorer import MarkovScorer


def read_scorer(engine: Path, spec: DraftSpec, executor: Executor) -> CandidateScorer | None:
    """The candidate scorer of the draft in the directory `engine`, which `executor` runs; None for a draft without."""
    if spec.lilicorr is not None:
        return LilicorrScorer(spec, executor)
    device = executor.device
    if spec.markov_head is not None:
        return MarkovScorer.read(engine, spec, device)
    return None if spec.candidate_selector is None else CandidateSelector.read(engine, spec, device)
