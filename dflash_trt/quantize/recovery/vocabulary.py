# SPDX-License-Identifier: Apache-2.0
"""How token ids enter a draft and leave it: its own embedding and head where it has them, else the target's."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, head_token_ids
from dflash_trt.checkpoint.draft_spec import HEAD
from dflash_trt.checkpoint.mapped import as_float32, map_tensor
from dflash_trt.quantize.calibrate import BlockEmbedding
from dflash_trt.quantize.features import FeatureFile, FeatureSequence

NOT_PROPOSED = -1
"""The label of a token that no row of the head stands for."""


class Vocabulary:
    """Embedding and head of a draft, in FLOAT; neither is trained."""

    def __init__(self, draft: DraftCheckpoint, features: FeatureFile) -> None:
        """What the draft borrows comes from the feature file."""
        spec = draft.spec
        self._spec, self._embedding = spec, BlockEmbedding(draft, features.mask_embedding())
        self._head, self._bias = _head(draft, features)
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


def _head(draft: DraftCheckpoint, features: FeatureFile) -> tuple[torch.Tensor, torch.Tensor | None]:
    """weight [V', H] and, where the head has one, bias [V']."""
    if draft.spec.has_own_head:
        return torch.from_numpy(as_float32(map_tensor(draft.weights[f"{HEAD}.weight"]))), None
    weight, bias = features.lm_head()
    return weight.float(), None if bias is None else bias.float()
