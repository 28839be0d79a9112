# SPDX-License-Identifier: Apache-2.0
"""Attention by torch's operators, on devices other than CPUs.

Legend: B segments of a group, n tokens of each, R rows of a pass, C cached rows, N heads, G KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt.kvcache.page_table import num_pages_for
from dflash_trt.kvcache.slot_cache import SlotCache
from dflash_trt.targets.packed_pass import Group, Pass
from dflash_trt.targets.target import Segment

GATHERED_VALUES = 2**15
"""Of K, of one segment: up to here copying the pages of a group costs less than attending to its segments in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a group reads of a layer's cache."""

    place: slice | Tensor
    """Rows of the one segment, which lie one behind the other, or pages [B * M] of all."""
    num_rows: int
    """C: the first so many of each segment's."""
    mask: Tensor
    """[1, B, N/G * n, C]: 0 for a row that a token sees, else minus infinity."""

    def of(self, cache: Tensor, num_segments: int) -> Tensor:
        """cache [G, pages, tokens_per_page, D] -> [G, B, C, D]."""
        if isinstance(self.place, slice):
            return cache.flatten(1, 2)[:, None, self.place]
        pages = cache.index_select(1, self.place)
        return pages.view(len(cache), num_segments, -1, cache.shape[-1])[:, :, : self.num_rows]


class GatheredPass(Pass):
    """Over K and V [G, pages, 32, D]."""

    reads_hidden_rows = True

    def __init__(self, segments: Sequence[Segment], cache: SlotCache, device: torch.device) -> None:
        super().__init__(segments, cache, device)
        self._readings: dict[tuple[Group, int | None, int, torch.dtype], Reading] = {}
        self._singles: dict[Group, list[Group]] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """As `Pass` says."""
        k_cache, v_cache = self._store(layer, key, value)
        num_kv_heads = len(k_cache)
        mixed = []
        for group in self.groups:
            for part in self._parts(group, num_kv_heads * key.shape[-1]):
                reading = self._reading(part, window, len(query) // num_kv_heads, query.dtype)
                k, v = (reading.of(cache, part.num_segments) for cache in (k_cache, v_cache))
                q = _by_kv_head(query[:, part.rows], part, num_kv_heads)
                mixed.append(_by_row(_attend(q, k, v, reading.mask, scale, softcap, sinks, part.num_tokens), part))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new rows; the layer's whole K and V."""
        size = self._table.tokens_per_page
        pages = (size, key.shape[-1]), (size, value.shape[-1])
        k, v = self._cache.layer(layer, len(key), *pages, key.dtype)
        k.view(len(k), -1, k.shape[-1]).index_copy_(1, self._rows, key)
        v.view(len(v), -1, v.shape[-1]).index_copy_(1, self._rows, value)
        return k, v

    @cached_property
    def _rows(self) -> Tensor:
        """[R]: those of the cache."""
        rows = (self._table.rows(slot, n) for slot, n in zip(self._slots, self._counts, strict=True))
        return torch.tensor([row for own in rows for row in own], device=self._device)

    def _parts(self, group: Group, values_per_token: int) -> list[Group]:
        """The group, or where a segment has many values of K, each of its segments, which are read in place."""
        if group.num_segments == 1 or group.end * values_per_token <= GATHERED_VALUES:
            return [group]
        if group not in self._singles:
            first, n = group.rows.start, group.num_tokens
            members = [self._slots.index(slot) for slot in group.slot_ids]
            self._singles[group] = [self._group([i], n, first + k * n) for k, i in enumerate(members)]
        return self._singles[group]

    def _reading(self, group: Group, window: int | None, heads_per_group: int, dtype: torch.dtype) -> Reading:
        """What `group` needs of a layer with this `window`, as a mask of `dtype`."""
        key = (group, window, heads_per_group, dtype)
        if key not in self._readings:
            place, first = self._place(group, 0 if window is None else max(0, group.begin - window + 1))
            rows = torch.arange(first, group.end, device=group.positions.device)
            distance = group.positions[:, :, None] - rows  # [B, n, C]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros(visible.shape, dtype=dtype, device=rows.device).masked_fill_(~visible, -torch.inf)
            self._readings[key] = Reading(
                place=place, num_rows=len(rows), mask=mask.repeat(1, heads_per_group, 1)[None]
            )
        return self._readings[key]

    def _place(self, group: Group, first: int) -> tuple[slice | Tensor, int]:
        """Where positions `first` to `group.end` lie, and the first of them that is read: a page is read whole."""
        offset = self._table.offsets[group.slot_ids[0]]
        if group.num_segments == 1 and offset is not None:
            return slice(offset + first, offset + group.end), first
        size = self._table.tokens_per_page
        first_page, end_page = first // size, num_pages_for(group.end, size)
        pages: list[int] = []
        for slot in group.slot_ids:
            held = num_pages_for(self._table.lengths[slot] + group.num_tokens, size)
            own = self._table.pages[slot][first_page : min(held, end_page)]
            # A shorter sequence is filled up with a page of its own: no token sees it, and it holds no one else's NaN.
            pages += own + [self._table.pages[slot][0]] * (end_page - first_page - len(own))
        return torch.tensor(pages, device=self._device), first_page * size


def _by_kv_head(query: Tensor, group: Group, num_groups: int) -> Tensor:
    """[N, B*n, D] -> [G, B, N/G * n, D]: heads that share K and V are rows."""
    heads = query.reshape(num_groups, -1, group.num_segments, group.num_tokens, query.shape[-1])
    return heads.transpose(1, 2).reshape(num_groups, group.num_segments, -1, query.shape[-1])


def _by_row(mixed: Tensor, group: Group) -> Tensor:
    """[G, B, N/G * n, D] -> [B*n, N, D]."""
    rows = mixed.reshape(len(mixed), group.num_segments, -1, group.num_tokens, mixed.shape[-1])
    return rows.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None,
    num_tokens: int,
) -> Tensor:  # fmt: skip
    """q [G, B, N/G * n, D], k and v [G, B, C, D], mask [1, B, N/G * n, C] -> as q, with v's D."""
    if sinks is None and softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return _softmax(scores + mask, sinks, num_tokens) @ v


def _softmax(scores: Tensor, sinks: Tensor | None, num_tokens: int) -> Tensor:
    """Softmax of scores [G, B, N/G * n, C]; a head's sink takes its share and carries no value."""
    if sinks is None:
        return scores.softmax(dim=-1)
    rows = sinks.reshape(len(scores), -1).repeat_interleave(num_tokens, dim=1)  # [G, N/G * n]
    sink = rows.to(scores.dtype)[:, None, :, None]
    return torch.cat([scores, sink.expand(-1, scores.shape[1], -1, -1)], dim=-1).softmax(dim=-1)[..., :-1]
