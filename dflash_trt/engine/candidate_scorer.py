# SPDX-License-Identifier: Apache-2.0
"""Scorers of a candidate lattice, and what each kind of draft adds: the gain of each pair of neighbours.

Sums are in FP32: rounded to BF16 they change which candidate is best. Only rows of a scorer's tables are read, so on a
CPU the tables stay in their file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import CONFIDENCE, D2T, MARKOV, SELECTOR, DraftSpec
from dflash_trt.checkpoint.draft_tensors import dspark_shapes
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.device.upload import uploaded
from dflash_trt.engine.candidate_lattice import CandidateLattice
from dflash_trt.engine.executor import CorrelatorInputs, Executor

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


class MarkovScorer(CandidateScorer):
    """DSpark's Markov head and confidence head, of an engine directory.

    Candidate b after candidate a gains, with w = markov_w1[a] and the final hidden row h,

        markov_w2[b] . (w, or sigmoid(gate_proj [h; w]) * w of a gated head)

    The confidence head estimates the probability that the token of a slot after token a is accepted, given those before
    it: sigmoid(proj [h; w]) (DeepSpec @ afdfa7c9, modeling/dspark/markov_head.py and eval/dspark/draft_ops.py, which
    score the whole vocabulary). It does not read the token itself, so cutting a block by it leaves samples exact.
    """

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


class LilicorrScorer(CandidateScorer):
    """LiLiCorr's correlator, a graph of an executor's engine directory."""

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


def read_scorer(engine: Path, spec: DraftSpec, executor: Executor) -> CandidateScorer | None:
    """The candidate scorer of the draft in the directory `engine`, which `executor` runs; None for a draft without."""
    if spec.lilicorr is not None:
        return LilicorrScorer(spec, executor)
    device = executor.device
    if spec.markov_head is not None:
        return MarkovScorer.read(engine, spec, device)
    return None if spec.candidate_selector is None else CandidateSelector.read(engine, spec, device)
