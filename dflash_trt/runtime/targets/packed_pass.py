# SPDX-License-Identifier: Apache-2.0
"""The rows of one pass: the new tokens of all requests, end to end in one row dimension.

Legend: B segments of a group, n tokens of each, R rows of a pass, N heads, G KV heads, D head_dim, E that of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_trt.runtime.kvcache.paged_caches import SlotCache
from dflash_trt.runtime.targets.target import Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Neighbouring segments of equally many tokens, computed together."""

    rows: slice
    """Rows of the pass."""
    slot_ids: list[int]
    slots: slice | Tensor
    """`slot_ids` as an index; a slice where they are consecutive."""
    num_segments: int
    num_tokens: int
    """n, of each segment."""
    positions: Tensor
    """[B, n]"""
    begin: int
    """The lowest position of the group."""
    end: int
    """One past the highest position of the group."""


class AttentionRule(NamedTuple):
    """Scale, window, softcap and sinks of a layer's attention."""

    scale: float
    window: int | None = None
    """Number of last positions that are seen, the token's own included."""
    softcap: float | None = None
    """A score is softcap * tanh(score / softcap)."""
    sinks: Tensor | None = None
    """[N]: a head's sink takes a share of the softmax and carries no value."""


class Pass:
    """What attention asks of a pass, for every layer alike; how it is computed is the subclass's."""

    positions: Tensor
    """[R]"""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        """query [N, R, D], key [G, R, D], value [G, R, E] -> [R, N, E]; keys and values go into the cache.

        Each token sees its own sequence up to itself.
        """
        raise NotImplementedError


class RaggedPass(Pass):
    """Pass over segments of any lengths."""

    attention: ClassVar[str]
    """What computes it, for people."""
    reads_hidden_rows: ClassVar[bool] = False
    """Whether masked rows still take part as 0 * value, so that they must not be NaN."""

    def __init__(self, segments: Sequence[Segment], cache: SlotCache, device: torch.device) -> None:
        """The cache's table has room for the segments behind what their slots hold."""
        self._cache, self._table, self._device = cache, cache.table, device
        self._slots = [segment.slot for segment in segments]
        self._counts = [len(segment.token_ids) for segment in segments]
        self._begins = [cache.table.lengths[slot] for slot in self._slots]
        spans = (range(begin, begin + n) for begin, n in zip(self._begins, self._counts, strict=True))
        self.positions = torch.from_numpy(np.array([*chain.from_iterable(spans)])).to(device)

    def padded_positions(self, num_rows: int) -> Tensor:
        """Positions of the rows, padded with zeros to `num_rows`."""
        num_padding = num_rows - self.positions.shape[0]
        return F.pad(self.positions, (0, num_padding)) if num_padding else self.positions

    @cached_property
    def groups(self) -> list[Group]:
        """All segments, as few groups as their order allows."""
        groups: list[Group] = []
        for num_tokens, members in groupby(range(len(self._slots)), key=self._counts.__getitem__):
            first_row = groups[-1].rows.stop if groups else 0
            groups.append(self._group(list(members), num_tokens, first_row))
        return groups

    def _group(self, members: list[int], num_tokens: int, first_row: int) -> Group:
        """Segments `members`, from row `first_row` of the pass."""
        rows = slice(first_row, first_row + len(members) * num_tokens)
        slots, begins = [self._slots[i] for i in members], [self._begins[i] for i in members]
        in_order = slots == list(range(slots[0], slots[0] + len(slots)))
        return Group(
            rows=rows,
            slot_ids=slots,
            slots=slice(slots[0], slots[-1] + 1) if in_order else torch.tensor(slots, device=self._device),
            num_segments=len(slots),
            num_tokens=num_tokens,
            positions=self.positions[rows].view(len(slots), num_tokens),
            begin=min(begins),
            end=max(begins) + num_tokens,
        )


IMPLEMENTATION = "slot_attention"  # transformers takes any name with "flash" in it for FlashAttention


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    slot_pass: Pass,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, N, R, D], key and value [1, G, R, D] of the pass -> [1, R, N, D].

    transformers' own signature (5.23, AttentionInterface); `s_aux` [N] are gpt-oss's sinks, `softcap` is Gemma 2's.
    Rows behind those of the pass are padding, in and out.
    """
    num_rows, num_padded = len(slot_pass.positions), query.shape[2]
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0, :, :num_rows] for x in (query, key, value))
    rows = slot_pass.attend(layer, query, key, value, AttentionRule(scale, sliding_window, softcap, s_aux))
    return F.pad(rows, (0, 0, 0, 0, 0, num_padded - num_rows))[None] if num_padded > num_rows else rows[None], None


AttentionInterface.register(IMPLEMENTATION, slot_attention)
