# SPDX-License-Identifier: Apache-2.0
"""Scorers of a candidate lattice, and DFlash2's: the head's logits, and the gain of each pair of neighbours.

Sums are in FP32: rounded to BF16 they change which candidate is best. Only rows of a scorer's tables are read, so on a
CPU the tables stay in their file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import SELECTOR, DraftSpec
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.device.upload import uploaded
from dflash_trt.engine.candidate_lattice import CandidateLattice

Embed = Callable[[Tensor], Tensor]
"""Embeddings [..., H] of token ids [...] int64."""


class DraftedBlock(NamedTuple):
    """The part of a draft pass that scorers may read, beside the candidates."""

    hidden: Tensor
    """[B, K, H] any float: final hidden rows of the slots."""
    anchors: Tensor
    """[B] int64: the last verified tokens."""
    context_hidden: Tensor | None
    """[B, H] any float: the last context rows before K and V, of a LiLiCorr draft."""
    embed: Embed
    """The target's embedding."""


class CandidateScorer:
    """Scores the candidates of each slot after those of the slot before."""

    def __init__(self, spec: DraftSpec) -> None:
        assert spec.num_candidates is not None
        self.top_k = spec.num_candidates
        self._multiplier = spec.output_multiplier
        self._cap = spec.final_logit_softcapping

    def from_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The k best ids of logits [B, K, V], and the values that `lattice` takes: their `final_logits`."""
        top, ids = logits.topk(self.top_k, dim=-1)
        return ids, self.final_logits(top)

    def final_logits(self, logits: Tensor) -> Tensor:
        """Logits of the head with the draft's multiplier and cap, which keep their order; FLOAT."""
        logits = logits.float() * self._multiplier
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def lattice(self, block: DraftedBlock, ids: Tensor, logits: Tensor) -> CandidateLattice:
        """Lattice of candidates `ids` int64, `logits` FLOAT [B, K, k] in the slots of `block`."""
        first = uploaded(block.anchors, ids.device)
        before = torch.cat([first[:, None, None].expand(-1, 1, ids.shape[-1]), ids[:, :-1]], dim=1)
        return CandidateLattice(ids, self._edges(block.hidden.float(), before, ids) + logits[:, :, None])

    def _edges(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        """[B, K, k, k] FLOAT: the gain of each of `ids` after each of `before`, [B, K, k] both."""
        raise NotImplementedError


class CandidateSelector(CandidateScorer):
    """DFlash2's candidate selector, a scorer of low rank, of an engine directory; its codebooks are read row by row.

    With codebooks A and B [V, r], W [r, H] and the final hidden rows h, candidate b after candidate a gains

        sum over r of A[a, r] * (W h[s])[r] * B[b, r]
    """

    def __init__(self, spec: DraftSpec, predecessors: Tensor, successors: Tensor, projection: Tensor) -> None:
        """`predecessors` and `successors` [V, r], `projection` [r, H], any floats."""
        super().__init__(spec)
        self.predecessor_codebook = predecessors
        self._successors = successors
        self._projection = projection.float()

    @classmethod
    def read(cls, engine: Path, spec: DraftSpec, device: torch.device) -> CandidateSelector:
        """The selector of the directory `engine`. On a CPU the codebooks stay in the file."""
        names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        with safe_open(engine / SINGLE, framework="pt", device=str(device)) as tensors:
            return cls(spec, *(tensors.get_tensor(f"{SELECTOR}.{name}") for name in names))

    def _edges(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        query = hidden @ self._projection.T  # [B, K, r]
        left = table_rows(self.predecessor_codebook, before) * query[:, :, None]
        return left @ table_rows(self._successors, ids).mT


def table_rows(codebook: Tensor, ids: Tensor) -> Tensor:
    """Rows [..., r] FLOAT of a table [V, r] that may lie elsewhere than `ids` [...]."""
    return torch.nn.functional.embedding(uploaded(ids, codebook.device), codebook).float()
