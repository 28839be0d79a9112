# SPDX-License-Identifier: Apache-2.0
"""Embeddings of a draft's blocks, from tables of its own or of the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import EMBEDDING, MASK_EMBEDDING, DraftSpec
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.device.upload import uploaded

Embed = Callable[[Tensor], Tensor]
"""Embeddings [..., H] of token ids [...] int64."""


class DraftEmbedding:
    """The tables that an engine holds: a whole embedding, the row of the mask token, both, or neither."""

    def __init__(self, spec: DraftSpec, table: Tensor | None = None, mask_row: Tensor | None = None) -> None:
        """`table` is [V, H], `mask_row` [H], any floats."""
        self._mask_token_id, self._block_size = spec.mask_token_id, spec.block_size
        self._table = table
        self._mask_row = mask_row
        self._blocks: Tensor | None = None

    @classmethod
    def read(cls, engine: Path, spec: DraftSpec, device: torch.device) -> DraftEmbedding:
        """The embedding of the directory `engine`, in its stored dtype; on a CPU it stays in the file."""
        with safe_open(engine / SINGLE, framework="pt", device=str(device)) as tensors:
            table = tensors.get_tensor(EMBEDDING) if spec.own_embedding else None
            mask_row = tensors.get_tensor(MASK_EMBEDDING) if spec.mask_embedding else None
        return cls(spec, table, mask_row)

    def blocks(self, anchors: Tensor, borrowed: Embed) -> Tensor:
        """Embeddings [B, S, H] of the blocks [anchor, mask, mask, ...] of token ids `anchors` [B] int64.

        The next call overwrites them. Mask rows are computed once, by the first `borrowed`.
        """
        if self._blocks is None or len(self._blocks) < len(anchors):
            masks = self.rows(torch.full((len(anchors), self._block_size), self._mask_token_id), borrowed)
            self._blocks = masks.contiguous()
        blocks = self._blocks[: len(anchors)]
        blocks[:, 0] = self.rows(anchors, borrowed)
        return blocks

    def rows(self, token_ids: Tensor, borrowed: Embed) -> Tensor:
        """Embeddings [..., H] of token ids [...] int64; `borrowed` is the target's embedding, own rows are FLOAT."""
        if self._table is None:
            rows = borrowed(token_ids)
        else:
            rows = torch.nn.functional.embedding(uploaded(token_ids, self._table.device), self._table).float()
        if self._mask_row is None:
            return rows
        is_mask = uploaded(token_ids == self._mask_token_id, rows.device)
        return torch.where(is_mask[..., None], self._mask_row.to(rows), rows)
