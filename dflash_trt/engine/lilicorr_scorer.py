# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr's scorer: the head's log probabilities and the candidates' embeddings for the correlator graph."""

from __future__ import annotations

from torch import Tensor

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.candidate_lattice import CandidateLattice
from dflash_trt.engine.candidate_scorer import CandidateScorer, DraftedBlock
from dflash_trt.engine.executor import CorrelatorInputs, Executor


class LilicorrScorer(CandidateScorer):
    """The correlator of an executor's engine directory."""

    def __init__(self, spec: DraftSpec, executor: Executor) -> None:
        super().__init__(spec)
        self._executor = executor

    def from_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The k best ids of logits [B, K, V], and their log probabilities FLOAT, without multiplier and cap."""
        top, ids = logits.topk(self.top_k, dim=-1)
        return ids, log_probs(top, logits)

    def lattice(self, block: DraftedBlock, ids: Tensor, logits: Tensor) -> CandidateLattice:
        """Lattice of candidates `ids` int64 with log probabilities `logits` FLOAT [B, K, k].

        K may be smaller than the draft's: the correlator then sees the first slots alone, as in vLLM 0.33.
        """
        assert block.context_hidden is not None
        inputs = CorrelatorInputs(block.embed(ids), logits, block.hidden, block.context_hidden)
        return CandidateLattice(ids, self._executor.correlate(inputs))


def log_probs(chosen: Tensor, logits: Tensor) -> Tensor:
    """Log probabilities FLOAT [..., k] of the logits `chosen` among all, [..., V]."""
    return chosen.float() - logits.float().logsumexp(-1, keepdim=True)
