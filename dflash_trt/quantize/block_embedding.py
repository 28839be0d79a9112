# SPDX-License-Identifier: Apache-2.0
"""Blocks of captured answers: the tokens that they begin with, and their embeddings."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import EMBEDDING, MASK_EMBEDDING
from dflash_trt.checkpoint.mapped import as_float32, map_tensor
from dflash_trt.quantize.features import FeatureSequence


def random_anchors(sequence: FeatureSequence, count: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """Up to `count` token indices of an answer, sorted; the last token is none, for nothing follows it."""
    candidates = np.arange(sequence.prompt_length, len(sequence.tokens) - 1)
    return np.sort(generator.choice(candidates, size=min(count, len(candidates)), replace=False))


class BlockEmbedding:
    """Embeds blocks by a draft's own table and mask embedding where it has them, else by the target's."""

    def __init__(self, draft: DraftCheckpoint, mask_embedding: torch.Tensor) -> None:
        """`mask_embedding` [H] is the target's."""
        spec, mask = draft.spec, mask_embedding.float().numpy()
        self._table = map_tensor(draft.weights[EMBEDDING]) if spec.own_embedding else None
        if self._table is not None:
            mask = as_float32(self._table[spec.mask_token_id])
        if spec.mask_embedding:
            mask = as_float32(map_tensor(draft.weights[MASK_EMBEDDING]))
        self._masks = np.tile(mask, (spec.block_size, 1))

    def blocks(self, sequence: FeatureSequence, anchors: NDArray[np.int64]) -> NDArray[np.float32]:
        """[B, S, H] FLOAT: the embedding of the token at each anchor [B], then S - 1 mask embeddings."""
        blocks = np.tile(self._masks, (len(anchors), 1, 1))
        if self._table is None:
            blocks[:, 0] = sequence.embeddings[anchors - sequence.prompt_length].float().numpy()
        else:
            blocks[:, 0] = as_float32(self._table[sequence.tokens.numpy()[anchors]])
        return blocks
