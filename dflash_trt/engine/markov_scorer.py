# SPDX-License-Identifier: Apache-2.0
"""DSpark's Markov head, which scores candidates, and its confidence head, which estimates how long a draft survives.

Candidate b after candidate a gains, with w = markov_w1[a] and the final hidden row h,

    markov_w2[b] . (w, or sigmoid(gate_proj [h; w]) * w of a gated head)

The confidence head estimates the probability that the token of a slot after token a is accepted, given those before it:
sigmoid(proj [h; w]) (DeepSpec @ afdfa7c9, modeling/dspark/markov_head.py and eval/dspark/draft_ops.py, which score the
whole vocabulary). It does not read the token itself, so cutting a block by it leaves samples exact.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import CONFIDENCE, D2T, MARKOV, DraftSpec
from dflash_trt.checkpoint.draft_tensors import dspark_shapes
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.engine.candidate_lattice import CandidateLattice
from dflash_trt.engine.candidate_scorer import CandidateScorer, DraftedBlock, table_rows


class MarkovScorer(CandidateScorer):
    """The heads of an engine directory."""

    def __init__(self, spec: DraftSpec, tensors: dict[str, Tensor]) -> None:
        """`tensors` are those of `DraftSpec.dspark_shapes`, any floats, and d2t if the draft has it."""
        super().__init__(spec)
        self._w1 = tensors.pop(f"{MARKOV}.markov_w1.weight")
        self._w2 = tensors.pop(f"{MARKOV}.markov_w2.weight")
        self._rows: Tensor | None = None
        """The rows [V] of markov_w2, by the target's token id, where it has only those of a smaller vocabulary."""
        d2t = tensors.pop(D2T, None)
        if d2t is not None and spec.markov_head is not None and spec.markov_head.num_rows is not None:
            rows = torch.arange(len(d2t), device=d2t.device)
            self._rows = torch.zeros(spec.vocab_size or 0, dtype=torch.int64, device=d2t.device)
            self._rows[rows + d2t] = rows
        self._linear = {name: tensor.float() for name, tensor in tensors.items()}

    @classmethod
    def read(cls, engine: Path, spec: DraftSpec, device: torch.device) -> MarkovScorer:
        """The heads of the directory `engine`. On a CPU the tables stay in the file."""
        with safe_open(engine / SINGLE, framework="pt", device=str(device)) as tensors:
            names = [*dspark_shapes(spec), *([D2T] if spec.has_d2t else [])]
            return cls(spec, {name: tensors.get_tensor(name) for name in names})

    def lattice(self, block: DraftedBlock, ids: Tensor, logits: Tensor) -> CandidateLattice:
        """The lattice, with the survival of its paths where there is a confidence head."""
        lattice = super().lattice(block, ids, logits)
        if f"{CONFIDENCE}.proj.weight" not in self._linear:
            return lattice
        return CandidateLattice(
            lattice.ids, lattice.scores, partial(self._survival, block.hidden.float(), block.anchors)
        )

    def _edges(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        rows = table_rows(self._w1, before)
        if f"{MARKOV}.gate_proj.weight" in self._linear:
            rows = rows * self._sigmoid(f"{MARKOV}.gate_proj", hidden[:, :, None], rows)
        return rows @ table_rows(self._w2, ids if self._rows is None else self._rows[ids]).mT

    def _survival(self, hidden: Tensor, anchors: Tensor, path: Tensor) -> Tensor:
        """[B, K], never rising, of token ids [B, K] after `anchors`."""
        before = torch.cat([anchors[:, None], path[:, :-1]], dim=1)
        confidence = self._sigmoid(f"{CONFIDENCE}.proj", hidden, table_rows(self._w1, before))
        return confidence.squeeze(-1).cumprod(-1)

    def _sigmoid(self, name: str, hidden: Tensor, rows: Tensor) -> Tensor:
        """sigmoid(W [hidden; rows] + b); either part may broadcast."""
        weight, H = self._linear[f"{name}.weight"], hidden.shape[-1]
        return (hidden @ weight[:, :H].T + rows @ weight[:, H:].T + self._linear[f"{name}.bias"]).sigmoid()
