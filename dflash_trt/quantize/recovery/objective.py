# SPDX-License-Identifier: Apache-2.0
"""What recovery minimises: DFlash's loss (arXiv 2602.06036, section 3.3) on what the target itself wrote.

At an anchor a of an answer the block is token a's embedding and S - 1 mask embeddings, its context the features of
all tokens before a, as in decoding. Slot k should propose token a + k:

    loss = sum over anchors and k of w_k * cross_entropy(head(hidden_k), token a + k) / sum of w_k
    w_k = exp(-(k - 1) / gamma)

Slots behind the answer's end count for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.quantize.features import FeatureFile, FeatureSequence
from dflash_trt.quantize.recovery.torch_draft import TorchDraft

GAMMAS = {0: 0.0, 8: 4.0, 10: 5.0, 16: 7.0}
"""The paper's decay by block size; between them it is interpolated, beyond the last it stays."""
Example = tuple[FeatureSequence, torch.Tensor]
"""A sequence and its anchors [B] int64."""


def slot_weights(block_size: int) -> torch.Tensor:
    """w_k of slots 1 to S - 1, [S - 1]."""
    gamma = float(np.interp(block_size, list(GAMMAS), list(GAMMAS.values())))
    return torch.exp(-torch.arange(block_size - 1) / gamma)


def random_anchors(
    prompt_length: int, num_tokens: int, count: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Up to `count` token indices of an answer, sorted; the last token is none, for nothing follows it."""
    candidates = np.arange(prompt_length, num_tokens - 1)
    return np.sort(generator.choice(candidates, size=min(count, len(candidates)), replace=False))


class Objective:
    """The loss of a draft's blocks under the target's head."""

    def __init__(self, spec: DraftSpec, features: FeatureFile) -> None:
        """Head and mask embedding are those of the feature file."""
        weight, bias = features.lm_head()
        self._spec = spec
        self._head = weight.float(), None if bias is None else bias.float()
        self._mask = features.mask_embedding().float()
        self._weights = slot_weights(spec.block_size)

    def total_weight(self, examples: Sequence[Example]) -> float:
        """The sum of w_k over all slots of all examples."""
        return sum(float((self._weights * self._slots(example)[1]).sum()) for example in examples)

    def weighted_sum(self, draft: TorchDraft, example: Example) -> torch.Tensor:
        """The sum of w_k * cross entropy of one example, with gradients to the draft's weights."""
        sequence, anchors = example
        labels, exist = self._slots(example)
        noise = self._mask.repeat(len(anchors), self._spec.block_size, 1)
        noise[:, 0] = sequence.embeddings[anchors - sequence.prompt_length].float()
        context = draft.context(sequence.taps[: int(anchors.max())])
        hidden = draft.blocks(noise, anchors, context)[:, 1:]
        losses = F.cross_entropy(self._logits(hidden[exist]), labels[exist], reduction="none")
        return (losses * self._weights.expand(labels.shape)[exist]).sum()

    def _slots(self, example: Example) -> tuple[torch.Tensor, torch.Tensor]:
        """Labels [B, S - 1], and whether the answer has them."""
        sequence, anchors = example
        indices = anchors[:, None] + torch.arange(1, self._spec.block_size)
        last = len(sequence.tokens) - 1
        return sequence.tokens[indices.clamp(max=last)], indices <= last

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, *self._head) * self._spec.output_multiplier
        cap = self._spec.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)
