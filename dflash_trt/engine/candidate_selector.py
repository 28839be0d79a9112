# SPDX-License-Identifier: Apache-2.0
"""DFlash2's candidate selector, a scorer of low rank.

With codebooks A and B [V, r], W [r, H] and the final hidden rows h, candidate b after candidate a gains

    sum over r of A[a, r] * (W h[s])[r] * B[b, r]
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import SELECTOR, DraftSpec
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.engine.candidate_scorer import CandidateScorer, table_rows


class CandidateSelector(CandidateScorer):
    """The selector of an engine directory; its codebooks are read row by row."""

    def __init__(self, spec: DraftSpec, predecessors: Tensor, successors: Tensor, projection: Tensor) -> None:
        """`predecessors` and `successors` [V, r], `projection` [r, H], any floats."""
        super().__init__(spec)
        self.predecessor_codebook = predecessors
        self._successors = successors
        self._projection = projection.float()

    @classmethod
    def read(cls, engine: Path, spec: DraftSpec, device: torch.device) -> CandidateSelector | None:
        """The selector of the directory `engine`; None for a draft without. On a CPU the codebooks stay in the file."""
        if spec.candidate_selector is None:
            return None
        names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        with safe_open(engine / SINGLE, framework="pt", device=str(device)) as tensors:
            return cls(spec, *(tensors.get_tensor(f"{SELECTOR}.{name}") for name in names))

    def _edges(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        query = hidden @ self._projection.T  # [B, K, r]
        left = table_rows(self.predecessor_codebook, before) * query[:, :, None]
        return left @ table_rows(self._successors, ids).mT
