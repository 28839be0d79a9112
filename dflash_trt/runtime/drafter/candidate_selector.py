# SPDX-License-Identifier: Apache-2.0
"""Proposals, and the lattice of scored candidates that DFlash2's selector or DSpark's Markov head walks to draw them.

For each slot s of a block the head gives k candidates c[s] with logits u[s]. The score of candidate b behind candidate
a of the slot before is

    score[s, a, b] = u[s, b] + sum over r of A[c[s - 1, a], r] * (W h[s])[r] * B[c[s, b], r]

with codebooks A and B [V, r], W [r, H] and the final hidden rows h; the anchor alone stands before slot 0. The walk
takes the best candidate behind the one it has just taken, or draws one from softmax(score / temperature) (z-lab's
dflash 0.1.0, CandidateSelector.select). Sums are in FP32: rounded to BF16 they change which candidate is best. Of the
codebooks only rows are read, so they stay in their file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt import _C
from dflash_trt.checkpoint.draft_spec import CONFIDENCE, D2T, MARKOV, SELECTOR, DraftSpec
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.device.upload import uploaded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Draw(NamedTuple):
    """Sampling parameters of one block's proposals."""

    params: _C.SamplerParams
    """Only temperature and seed are used; filters and penalties are the target's, as in z-lab's dflash 0.1.0."""
    position: int
    """Output position of the first proposal."""


class Proposals(NamedTuple):
    """K tokens proposed behind one anchor."""

    token_ids: list[int]
    candidate_ids: NDArray[np.int64] | None = None
    """[K, k], the candidates of proposals that were drawn; None for greedy ones."""
    probabilities: NDArray[np.float64] | None = None
    """[K, k]: probability of each candidate, given the tokens drawn before it."""
    survival: list[float] | None = None
    """[K], never rising: the draft's estimate that each token is accepted with all before it; None without one."""

    def first(self, count: int) -> Proposals:
        """The first `count` proposals."""
        ids, q, survival = self.candidate_ids, self.probabilities, self.survival
        return Proposals(
            self.token_ids[:count],
            None if ids is None else ids[:count],
            None if q is None else q[:count],
            None if survival is None else survival[:count],
        )


class Candidates:
    """A lattice: ids [B, K, k] int64, and scores [B, K, k, k] FLOAT of each behind each of the slot before."""

    def __init__(self, ids: Tensor, scores: Tensor, survival: Callable[[Tensor], Tensor] | None = None) -> None:
        """`survival` of a path [B, K]: how likely, by the draft, each token is accepted with all before it, [B, K]."""
        self.ids = ids
        self.scores = scores
        self._survival = survival

    def greedy_walk(self) -> Tensor:
        """The token ids [B, K] of the path that takes the best candidate in every slot; of equals the first."""
        return self.ids.gather(2, self._best()).squeeze(-1)

    def greedy_rows(self) -> Tensor:
        """The scores [B, K, k] that the greedy walk chooses by, each slot's behind the candidate taken before."""
        before = torch.nn.functional.pad(self._best()[:, :-1], (0, 0, 1, 0))
        return self.scores.gather(2, before[..., None].expand(-1, -1, 1, self.scores.shape[-1])).squeeze(2)

    def _best(self) -> Tensor:
        """The indices [B, K, 1] that the greedy walk takes."""
        best = self.scores.argmax(dim=-1)  # [B, K, k]: behind each candidate of the slot before
        taken = best[:, 0, :1]
        path = [taken]
        for slot in range(1, best.shape[1]):
            taken = best[:, slot].gather(1, taken)
            path.append(taken)
        return torch.stack(path, dim=1)

    def walk(self, draws: Sequence[Draw | None]) -> list[Proposals]:
        """A path for each block: drawn where it has a Draw, greedy elsewhere."""
        paths = self._paths(draws)
        if self._survival is None:
            return paths
        survival = self._survival(torch.tensor([path.token_ids for path in paths])).tolist()
        return [path._replace(survival=row) for path, row in zip(paths, survival, strict=True)]

    def _paths(self, draws: Sequence[Draw | None]) -> list[Proposals]:
        paths = [Proposals(token_ids) for token_ids in self.greedy_walk().tolist()]
        drawing = [(row, draw) for row, draw in enumerate(draws) if draw is not None]
        if not drawing:
            return paths
        rows, count = [row for row, _ in drawing], self.ids.shape[1]
        temperatures = [draw.params.temperature for _, draw in drawing]
        bits = [_C.uniform_bits(draw.params.seed, draw.position, count, 1) for _, draw in drawing]
        uniforms = [[2.0**-53 * number for number in row] for row in bits]
        drawn, probabilities = Candidates(self.ids[rows], self.scores[rows]).sampled_walk(
            *(torch.tensor(values, dtype=torch.float64, device=self.ids.device) for values in (temperatures, uniforms))
        )
        ids, q = self.ids[rows].cpu().numpy(), probabilities.cpu().numpy()
        for index, (row, token_ids) in enumerate(zip(rows, drawn.tolist(), strict=True)):
            paths[row] = Proposals(token_ids, ids[index], q[index])
        return paths

    def sampled_walk(self, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Paths [B, K] drawn with numbers [B, K] in [0, 1) at temperatures [B] > 0, and each step's distribution.

        That is [B, K, k] FLOAT64: softmax(scores / temperature) behind the candidate that was drawn before.
        """
        scores = self.scores.double().nan_to_num()
        behind, path, distributions = scores[:, 0, 0], [], []
        for slot in range(scores.shape[1]):
            q = ((behind - behind.amax(-1, keepdim=True)) / temperatures[:, None]).softmax(-1)
            cumulative = q.cumsum(-1)
            below = cumulative <= uniforms[:, slot, None] * cumulative[:, -1:]
            drawn = below.sum(-1).clamp(max=q.shape[-1] - 1)
            path.append(drawn)
            distributions.append(q)
            if slot + 1 < scores.shape[1]:
                behind = scores[torch.arange(len(scores)), slot + 1, drawn]
        taken = torch.stack(path, dim=1)[:, :, None]
        return self.ids.gather(2, taken).squeeze(-1), torch.stack(distributions, dim=1)


class CandidateScorer:
    """Scores the candidates of each slot behind those of the slot before."""

    def __init__(self, spec: DraftSpec) -> None:
        assert spec.num_candidates is not None
        self.top_k = spec.num_candidates
        self._multiplier = spec.output_multiplier
        self._cap = spec.final_logit_softcapping

    def from_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The k best ids of logits [B, K, V], and their `final_logits`."""
        top, ids = logits.topk(self.top_k, dim=-1)
        return ids, self.final_logits(top)

    def final_logits(self, logits: Tensor) -> Tensor:
        """Logits of the head with the draft's multiplier and cap, which keep their order; FLOAT."""
        logits = logits.float() * self._multiplier
        return logits if self._cap is None else self._cap * torch.tanh(logits / self._cap)

    def lattice(self, hidden: Tensor, anchors: Tensor, ids: Tensor, logits: Tensor) -> Candidates:
        """Scores of candidates `ids`, `logits` [B, K, k] in slots with final hidden rows [B, K, H] behind `anchors`.

        anchors [B] int64 are the last verified tokens.
        """
        first = uploaded(anchors, ids.device)
        before = torch.cat([first[:, None, None].expand(-1, 1, ids.shape[-1]), ids[:, :-1]], dim=1)
        return Candidates(ids, self._edges(hidden.float(), before, ids) + logits[:, :, None])

    def _edges(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        """[B, K, k, k] FLOAT: what each of `ids` gains behind each of `before`, [B, K, k] both."""
        raise NotImplementedError


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


def table_rows(codebook: Tensor, ids: Tensor) -> Tensor:
    """Rows [..., r] FLOAT of a table [V, r] that may lie elsewhere than `ids` [...]."""
    return torch.nn.functional.embedding(uploaded(ids, codebook.device), codebook).float()


class MarkovScorer(CandidateScorer):
    """DSpark's Markov and confidence heads of an engine directory; their tables are read row by row.

    The score of candidate b behind candidate a of the slot before, with w = markov_w1[a] and the final hidden row h:

        score[s, a, b] = u[s, b] + markov_w2[b] . (w, or sigmoid(gate_proj [h; w]) * w of a gated head)

    The confidence head says of a slot behind token a how likely its token is accepted, given those before it:
    sigmoid(proj [h; w]) (DeepSpec @ afdfa7c9, modeling/dspark/markov_head.py and eval/dspark/draft_ops.py, which score
    the whole vocabulary). It reads nothing of the token itself, so cutting a block by it leaves samples exact.
    """

    def __init__(self, spec: DraftSpec, tensors: dict[str, Tensor]) -> None:
        """`tensors` are those of `DraftSpec.dspark_shapes`, any floats, and d2t of a draft that has it."""
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
            names = [*spec.dspark_shapes(), *([D2T] if spec.has_d2t else [])]
            return cls(spec, {name: tensors.get_tensor(name) for name in names})

    def lattice(self, hidden: Tensor, anchors: Tensor, ids: Tensor, logits: Tensor) -> Candidates:
        """The lattice, with the survival of its paths where there is a confidence head."""
        lattice = super().lattice(hidden, anchors, ids, logits)
        if f"{CONFIDENCE}.proj.weight" not in self._linear:
            return lattice
        return Candidates(lattice.ids, lattice.scores, partial(self._survival, hidden.float(), anchors))

    def _edges(self, hidden: Tensor, before: Tensor, ids: Tensor) -> Tensor:
        rows = table_rows(self._w1, before)
        if f"{MARKOV}.gate_proj.weight" in self._linear:
            rows = rows * self._sigmoid(f"{MARKOV}.gate_proj", hidden[:, :, None], rows)
        return rows @ table_rows(self._w2, ids if self._rows is None else self._rows[ids]).mT

    def _survival(self, hidden: Tensor, anchors: Tensor, path: Tensor) -> Tensor:
        """[B, K], never rising, of token ids [B, K] behind `anchors`."""
        before = torch.cat([anchors[:, None], path[:, :-1]], dim=1)
        confidence = self._sigmoid(f"{CONFIDENCE}.proj", hidden, table_rows(self._w1, before))
        return confidence.squeeze(-1).cumprod(-1)

    def _sigmoid(self, name: str, hidden: Tensor, rows: Tensor) -> Tensor:
        """sigmoid(W [hidden; rows] + b); either part may broadcast."""
        weight, H = self._linear[f"{name}.weight"], hidden.shape[-1]
        return (hidden @ weight[:, :H].T + rows @ weight[:, H:].T + self._linear[f"{name}.bias"]).sigmoid()


def read_scorer(engine: Path, spec: DraftSpec, device: torch.device) -> CandidateScorer | None:
    """The candidate scorer of the draft in the directory `engine`; None for a draft without."""
    return (CandidateSelector if spec.markov_head is None else MarkovScorer).read(engine, spec, device)
