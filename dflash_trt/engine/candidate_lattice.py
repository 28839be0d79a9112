# SPDX-License-Identifier: Apache-2.0
"""The lattice of scored candidates, and the walks through it that make proposals.

For each slot s of a block the head gives k candidates c[s] with logits u[s]. The score of candidate b after candidate
a of the slot before is u[s, b] plus what the draft's scorer adds to that edge (candidate_scorer.py). The anchor alone
stands before slot 0. The walk takes the best candidate after the one it has just taken, or draws one from
softmax(score / temperature) (z-lab's dflash 0.1.0, CandidateSelector.select).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dflash_trt import _C
from dflash_trt.engine.proposals import Draw, Proposals


class CandidateLattice:
    """Ids [B, K, k] int64, and scores [B, K, k, k] FLOAT of each candidate after each of the slot before."""

    def __init__(self, ids: Tensor, scores: Tensor, survival: Callable[[Tensor], Tensor] | None = None) -> None:
        """`survival` maps a path [B, K] to the draft's estimates [B, K] that each token is accepted with all before."""
        self.ids = ids
        self.scores = scores
        self._survival = survival

    def greedy_walk(self) -> Tensor:
        """The token ids [B, K] of the path that takes the best candidate in every slot, and the first among equals."""
        return self.ids.gather(2, self._best()).squeeze(-1)

    def greedy_rows(self) -> Tensor:
        """The scores [B, K, k] that the greedy walk compares, each slot's after the candidate taken before."""
        before = torch.nn.functional.pad(self._best()[:, :-1], (0, 0, 1, 0))
        return self.scores.gather(2, before[..., None].expand(-1, -1, 1, self.scores.shape[-1])).squeeze(2)

    def _best(self) -> Tensor:
        """The indices [B, K, 1] that the greedy walk takes."""
        best = self.scores.argmax(dim=-1)  # [B, K, k]: after each candidate of the slot before
        taken = best[:, 0, :1]
        path = [taken]
        for slot in range(1, best.shape[1]):
            taken = best[:, slot].gather(1, taken)
            path.append(taken)
        return torch.stack(path, dim=1)

    @torch.inference_mode()
    def walk(self, draws: Sequence[Draw | None]) -> list[Proposals]:
        """A path for each block: drawn where `draws` has a Draw for it, greedy elsewhere."""
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
        drawn, probabilities = CandidateLattice(self.ids[rows], self.scores[rows]).sampled_walk(
            *(torch.tensor(values, dtype=torch.float64, device=self.ids.device) for values in (temperatures, uniforms))
        )
        ids, q = self.ids[rows].cpu().numpy(), probabilities.cpu().numpy()
        for index, (row, token_ids) in enumerate(zip(rows, drawn.tolist(), strict=True)):
            paths[row] = Proposals(token_ids, ids[index], q[index])
        return paths

    def sampled_walk(self, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        """Paths [B, K] drawn with numbers [B, K] in [0, 1) at temperatures [B] > 0, and each step's distribution.

        The distribution [B, K, k] FLOAT64 is softmax(scores / temperature) given the previously drawn candidate.
        """
        scores = self.scores.double().nan_to_num()
        after, path, distributions = scores[:, 0, 0], [], []
        for slot in range(scores.shape[1]):
            q = ((after - after.amax(-1, keepdim=True)) / temperatures[:, None]).softmax(-1)
            cumulative = q.cumsum(-1)
            below = cumulative <= uniforms[:, slot, None] * cumulative[:, -1:]
            drawn = below.sum(-1).clamp(max=q.shape[-1] - 1)
            path.append(drawn)
            distributions.append(q)
            if slot + 1 < scores.shape[1]:
                after = scores[torch.arange(len(scores)), slot + 1, drawn]
        taken = torch.stack(path, dim=1)[:, :, None]
        return self.ids.gather(2, taken).squeeze(-1), torch.stack(distributions, dim=1)
