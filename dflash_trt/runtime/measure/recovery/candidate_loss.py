# SPDX-License-Identifier: Apache-2.0
"""Loss of a LiLiCorr draft's scores, from which gradients reach its correlator and its layers.

Slot k's candidates are the draft's k best tokens; their scores after the true token of the slot before are the logits
of a distribution over them, as in the walk:

    loss_k = share * KL(teacher_k || draft_k) + (1 - share) * cross_entropy(draft_k, token a + k)

It counts where token a + k and all true tokens before it are candidates. The teacher scores the same candidates, best
first in its own order. Model Optimizer's LiLiCorr (pull request 2342, arXiv 2608.20530) has the second term, live log
probabilities, and the weight of 0.5; in the place of the first it has a penalty that reads the target's logits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.engine.candidate_scorer import log_probs
from dflash_trt.engine.executor import CorrelatorInputs
from dflash_trt.runtime.measure.recovery.correlator import Correlator
from dflash_trt.runtime.measure.recovery.torch_draft import TorchDraft

WEIGHT = 0.5
"""The factor of this loss beside DFlash's."""


class Drafted(NamedTuple):
    """A draft's blocks at the anchors of one example."""

    draft: TorchDraft
    hidden: torch.Tensor
    """[B, S - 1, H]: final rows of the slots that propose."""
    anchor_hidden: torch.Tensor
    """[B, H]: the context row before each anchor."""
    logits: torch.Tensor
    """[N, V'], without multiplier and cap: of the slots that are asked for, here of all."""


class CandidateLoss:
    """The loss of all candidates of blocks."""

    def __init__(self, draft: DraftCheckpoint, embedding: torch.Tensor) -> None:
        """`embedding` [V, H] FLOAT is the target's, on the device that trains."""
        assert draft.spec.lilicorr is not None
        self._top_k = draft.spec.lilicorr.top_k
        self._correlator = Correlator(draft, embedding.device)
        self._embedding = embedding

    def weighted_sum(
        self,
        ours: Drafted,
        theirs: Drafted | None,
        labels: torch.Tensor,
        weights: torch.Tensor,
        share: float,
    ) -> torch.Tensor:
        """WEIGHT times the sum of `weights` times loss_k, both [B, S - 1], for true tokens `labels` [B, S - 1].

        `theirs` are the teacher's blocks.
        """
        ids = ours.logits.view(*labels.shape, -1).topk(self._top_k).indices
        is_true = ids == labels[..., None]
        reached = is_true.any(-1).cumprod(dim=1).bool()
        with torch.no_grad():
            expected = None if theirs is None else self._scores(theirs, ids, labels)[reached]
        places = is_true.int().argmax(-1)
        losses = slot_losses(self._scores(ours, ids, labels)[reached], places[reached], expected, share)
        return WEIGHT * (losses * weights[reached]).sum()

    def _scores(self, drafted: Drafted, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, S - 1, k]: of each of `ids` after the true token of the slot before."""
        logits = drafted.logits.view(*labels.shape, -1)
        chosen, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        ranked = ids.gather(-1, order)
        embeds = F.embedding(ranked, self._embedding)
        inputs = CorrelatorInputs(embeds, log_probs(chosen, logits), drafted.hidden, drafted.anchor_hidden)
        scores = self._correlator.scores(drafted.draft.weights, inputs)
        places = (ranked == labels[..., None]).int().argmax(-1)
        before = F.pad(places[:, :-1], (1, 0))[..., None, None]
        return scores.take_along_dim(before, dim=2).squeeze(2).gather(-1, order.argsort(-1))


def slot_losses(
    logits: torch.Tensor, labels: torch.Tensor, expected: torch.Tensor | None, share: float
) -> torch.Tensor:
    """share * KL(expected || logits) + (1 - share) * cross entropy, [N], of logits [N, C] and labels [N].

    `expected` [N, C] are the teacher's logits; without them it is the cross entropy alone.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    if expected is None:
        return losses
    divergences = F.kl_div(
        F.log_softmax(logits, dim=-1), F.log_softmax(expected, dim=-1), reduction="none", log_target=True
    )
    return (1 - share) * losses + share * divergences.sum(-1)
