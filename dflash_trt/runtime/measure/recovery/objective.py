# SPDX-License-Identifier: Apache-2.0
"""Loss that recovery minimises on the target's own answers: divergence from the dense draft, and DFlash's loss.

At an anchor a of an answer the block is token a's embedding and S - 1 mask embeddings, its context the features of all
tokens before a, as in decoding. Slot k should propose token a + k, and the teacher, the draft as it was given, has a
distribution for it (arXiv 2602.06036, section 3.3, has the second term and the weights):

    loss_k = share * KL(teacher_k || draft_k) + (1 - share) * cross_entropy(draft_k, token a + k)
    loss   = sum over anchors and k of w_k * loss_k / sum of w_k
    w_k    = exp(-(k - 1) / gamma)

Slots after the answer's end are ignored, as are tokens without a row in the draft's own head. A LiLiCorr draft's loss
has a second part, on its scores (candidate_loss.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn import functional as F

from dflash_trt.checkpoint.decoded_tensor import as_float32, map_tensor
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import HEAD
from dflash_trt.checkpoint.own_vocabulary import head_token_ids
from dflash_trt.runtime.measure.calibrate import BlockEmbedding
from dflash_trt.runtime.measure.features import FeatureFile, FeatureSequence
from dflash_trt.runtime.measure.recovery.candidate_loss import CandidateLoss, Drafted, slot_losses
from dflash_trt.runtime.measure.recovery.torch_draft import TorchDraft

GAMMAS = {0: 0.0, 8: 4.0, 10: 5.0, 16: 7.0}
"""The paper's decay by block size; between them it is interpolated, beyond the last it stays."""
Example = tuple[FeatureSequence, torch.Tensor]
"""A sequence and its anchors [B] int64."""
NOT_PROPOSED = -1
"""The label of a token that no row of the head stands for."""


def slot_weights(block_size: int) -> torch.Tensor:
    """w_k of slots 1 to S - 1, [S - 1]."""
    gamma = float(np.interp(block_size, list(GAMMAS), list(GAMMAS.values())))
    return torch.exp(-torch.arange(block_size - 1) / gamma)


class Objective:
    """The loss of a draft's blocks."""

    def __init__(self, vocabulary: Vocabulary, block_size: int, candidates: CandidateLoss | None = None) -> None:
        """`candidates` is the further loss of a LiLiCorr draft."""
        self._vocabulary = vocabulary
        self._weights = slot_weights(block_size)
        self._candidates = candidates

    def total_weight(self, examples: Sequence[Example]) -> float:
        """The sum of w_k over all slots of all examples."""
        return sum(float((self._weights * self._slots(example)[1]).sum()) for example in examples)

    def weighted_sum(
        self, draft: TorchDraft, example: Example, teacher: TorchDraft | None = None, share: float = 0
    ) -> torch.Tensor:
        """The sum of w_k * loss_k of one example, with gradients to the draft's weights; `share` is the teacher's."""
        labels, exist = (slots.to(draft.device) for slots in self._slots(example))
        weights = self._weights.to(draft.device) * exist
        rows = exist if self._candidates is None else torch.ones_like(exist)  # a correlator reads the whole block
        ours, theirs = self._drafted(draft, example, rows), None
        with torch.no_grad():
            if teacher is not None:
                theirs = self._drafted(teacher, example, rows)
            expected = None if theirs is None else self._vocabulary.final_logits(theirs.logits)
        losses = slot_losses(self._vocabulary.final_logits(ours.logits), labels[rows], expected, share)
        total = (losses * weights[rows]).sum()
        if self._candidates is None:
            return total
        return total + self._candidates.weighted_sum(ours, theirs, labels, weights, share)

    def _drafted(self, draft: TorchDraft, example: Example, rows: torch.Tensor) -> Drafted:
        """The blocks, with the logits of their slots `rows`."""
        sequence, anchors = example
        context = draft.context(sequence.taps[: int(anchors.max())])
        hidden = draft.blocks(self._vocabulary.blocks(sequence, anchors), anchors, context)[:, 1:]
        anchor_hidden = context.hidden[anchors.to(draft.device) - 1]
        return Drafted(draft, hidden, anchor_hidden, self._vocabulary.logits(hidden[rows]))

    def _slots(self, example: Example) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels [B, S - 1], and which of them count, on the CPU."""
        sequence, anchors = example
        indices = anchors[:, None] + torch.arange(1, len(self._weights) + 1)
        last = len(sequence.tokens) - 1
        labels = self._vocabulary.labels(sequence.tokens[indices.clamp(max=last)])
        return labels, (indices <= last) & (labels != NOT_PROPOSED)


class Vocabulary:
    """Embedding and head of a draft, in FLOAT, the head on a device; neither is trained."""

    def __init__(self, draft: DraftCheckpoint, features: FeatureFile, device: str = "cpu") -> None:
        """Reads what the draft borrows from the feature file."""
        spec = draft.spec
        self._spec, self._embedding = spec, BlockEmbedding(draft, features.mask_embedding())
        self._head, self._bias = _head(draft, features, device)
        self._rows: torch.Tensor | None = None
        if (token_ids := head_token_ids(spec, draft.weights)) is not None:
            self._rows = torch.full([features.facts.target.vocab_size], NOT_PROPOSED)
            self._rows[torch.from_numpy(token_ids).long()] = torch.arange(len(token_ids))

    def blocks(self, sequence: FeatureSequence, anchors: torch.Tensor) -> torch.Tensor:
        """[B, S, H]: the embedding of the token at each anchor, then S - 1 mask embeddings."""
        return torch.from_numpy(self._embedding.blocks(sequence, anchors.numpy()))

    def labels(self, tokens: torch.Tensor) -> torch.Tensor:
        """The head's row of each token, NOT_PROPOSED where it has none."""
        return tokens if self._rows is None else self._rows[tokens]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[.., V'] of hidden [.., H], without multiplier and cap."""
        return F.linear(hidden, self._head, self._bias)

    def final_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` with the draft's multiplier and cap."""
        logits = logits * self._spec.output_multiplier
        cap = self._spec.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)


def read_objective(draft: DraftCheckpoint, features: FeatureFile, device: str = "cpu") -> Objective:
    """The loss of a draft on `features`, on the device that trains it."""
    candidates = None
    if draft.spec.lilicorr is not None:
        candidates = CandidateLoss(draft, features.embed_tokens().to(device).float())
    return Objective(Vocabulary(draft, features, device), draft.spec.block_size, candidates)


def _head(draft: DraftCheckpoint, features: FeatureFile, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """weight [V', H] and, where the head has one, bias [V']."""
    if draft.spec.has_own_head:
        return torch.from_numpy(as_float32(map_tensor(draft.weights[f"{HEAD}.weight"]))).to(device), None
    weight, bias = features.lm_head()
    return weight.to(device).float(), None if bias is None else bias.to(device).float()
