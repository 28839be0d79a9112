# SPDX-License-Identifier: Apache-2.0
"""Loss that recovery minimises on the target's own answers: divergence from the dense draft, and DFlash's loss.

At an anchor a of an answer the block is token a's embedding and S - 1 mask embeddings, its context the features of all
tokens before a, as in decoding. Slot k should propose token a + k, and the teacher, the draft as it was given, has a
distribution for it (arXiv 2602.06036, section 3.3, has the second term and the weights):

    loss_k = share * KL(teacher_k || draft_k) + (1 - share) * cross_entropy(draft_k, token a + k)
    loss   = sum over anchors and k of w_k * loss_k / sum of w_k
    w_k    = exp(-(k - 1) / gamma)

Slots after the answer's end are ignored, as are tokens without a row in the draft's own head.
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

    def __init__(self, vocabulary: Vocabulary, block_size: int) -> None:
        self._vocabulary = vocabulary
        self._weights = slot_weights(block_size)

    def total_weight(self, examples: Sequence[Example]) -> float:
        """The sum of w_k over all slots of all examples."""
        return sum(float((self._weights * self._slots(example)[1]).sum()) for example in examples)

    def weighted_sum(
        self, draft: TorchDraft, example: Example, teacher: TorchDraft | None = None, share: float = 0
    ) -> torch.Tensor:
        """The sum of w_k * loss_k of one example, with gradients to the draft's weights; `share` is the teacher's."""
        labels, exist = self._slots(example)
        weights = self._weights.expand(labels.shape)[exist].to(draft.device)
        logits = self._logits(draft, example, exist)
        losses = F.cross_entropy(logits, labels[exist].to(draft.device), reduction="none")
        if teacher is not None:
            losses = (1 - share) * losses + share * self._divergence(logits, teacher, example, exist)
        return (losses * weights).sum()

    def _divergence(
        self, logits: torch.Tensor, teacher: TorchDraft, example: Example, exist: torch.Tensor
    ) -> torch.Tensor:
        """KL(teacher || draft) of the slots that exist."""
        with torch.no_grad():
            expected = F.log_softmax(self._logits(teacher, example, exist), dim=-1)
        return F.kl_div(F.log_softmax(logits, dim=-1), expected, reduction="none", log_target=True).sum(-1)

    def _logits(self, draft: TorchDraft, example: Example, exist: torch.Tensor) -> torch.Tensor:
        """[slots that exist, V']."""
        sequence, anchors = example
        context = draft.context(sequence.taps[: int(anchors.max())])
        hidden = draft.blocks(self._vocabulary.blocks(sequence, anchors), anchors, context)
        return self._vocabulary.logits(hidden[:, 1:][exist.to(draft.device)])

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
        """[.., V'] of hidden [.., H]."""
        logits = F.linear(hidden, self._head, self._bias) * self._spec.output_multiplier
        cap = self._spec.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _head(draft: DraftCheckpoint, features: FeatureFile, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """weight [V', H] and, where the head has one, bias [V']."""
    if draft.spec.has_own_head:
        return torch.from_numpy(as_float32(map_tensor(draft.weights[f"{HEAD}.weight"]))).to(device), None
    weight, bias = features.lm_head()
    return weight.to(device).float(), None if bias is None else bias.to(device).float()
