# SPDX-License-Identifier: Apache-2.0
"""Embeddings of blocks: the draft's own rows where it has them, and the target's for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import EMBEDDING, MASK_EMBEDDING, DraftSpec
from dflash_trt.checkpoint.weights import SINGLE

Embed = Callable[[Tensor], Tensor]


class DraftEmbedding:
    """What an engine holds of an embedding: a whole table, the row of the mask token, both, or neither."""

    def __init__(self, mask_token_id: int, table: Tensor | None = None, mask_row: Tensor | None = None) -> None:
        """`table` is [V, H], `mask_row` [H], any floats."""
        self._mask_token_id = mask_token_id
        self._table = table
        self._mask_row = mask_row
        self._blocks: Tensor | None = None

    @classmethod
    def read(cls, engine: Path, spec: DraftSpec, device: torch.device) -> DraftEmbedding:
        """The embedding of the directory `engine`, in its stored dtype; on a CPU it stays in the file."""
        wanted = {EMBEDDING: spec.own_embedding, MASK_EMBEDDING: spec.mask_embedding}
        tensors = _read(engine / SINGLE, [name for name, has_it in wanted.items() if has_it], device)
        return cls(spec.mask_token_id, tensors.get(EMBEDDING), tensors.get(MASK_EMBEDDING))

    def blocks(self, anchors: Tensor, block_size: int, borrowed: Embed) -> Tensor:
        """Embeddings [B, S, H] of the blocks [anchor, mask, mask, ...] of token ids `anchors` [B] int64.

        The next call overwrites them: the mask rows are computed once, by the first `borrowed`.
        """
        if self._blocks is None or len(self._blocks) < len(anchors):
            masks = self.rows(torch.full((len(anchors), block_size), self._mask_token_id), borrowed)
            self._blocks = masks.contiguous()
        blocks = self._blocks[: len(anchors)]
        blocks[:, 0] = self.rows(anchors, borrowed)
        return blocks

    def rows(self, token_ids: Tensor, borrowed: Embed) -> Tensor:
        """Embeddings [..., H] of token ids [...] int64; `borrowed` is the target's embedding, own rows are FLOAT."""
        if self._table is None:
            rows = borrowed(token_ids)
        else:
            rows = torch.nn.functional.embedding(token_ids.to(self._table.device), self._table).float()
        if self._mask_row is None:
            return rows
        is_mask = (token_ids == self._mask_token_id).to(rows.device)
        return torch.where(is_mask[..., None], self._mask_row.to(rows), rows)


def _read(file: Path, names: Iterable[str], device: torch.device) -> dict[str, Tensor]:
    if not (names := list(names)):
        return {}
    with safe_open(file, framework="pt", device=str(device)) as tensors:
        return {name: tensors.get_tensor(name) for name in names}
