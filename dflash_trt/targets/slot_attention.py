# SPDX-License-Identifier: Apache-2.0
"""Attention of packed rows over caches of pages, as an attention implementation of transformers.

Each request keeps its K and V in the pages of its slot; a pass carries the new tokens of all requests end to end in
one row dimension. Linear layers and experts so see one matrix, and no request is padded to another's length.

Legend: B segments of a group, n tokens of each, R rows of a pass, C cached rows, N heads, G kv-heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_trt.pages.page_table import PageTable, num_pages_for
from dflash_trt.pages.page_tensor import FIRST_PAGES, grown, zeros
from dflash_trt.targets.row_independence import LANES, attend
from dflash_trt.targets.target import Segment

IMPLEMENTATION = "slot_attention"  # transformers takes any name with "flash" in it for FlashAttention
GATHERED_VALUES = 2**15
"""Of K, of one segment: up to here copying the pages of a group costs less than attending to its segments in turn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Neighbouring segments of equally many tokens, attended to together."""

    rows: slice
    """Of the pass."""
    slot_ids: list[int]
    slots: slice | Tensor
    """The same; a slice where they stand in order."""
    num_segments: int
    num_tokens: int
    """n, of each segment."""
    positions: Tensor
    """[B, n]"""
    begin: int
    """The lowest position of the group."""
    end: int
    """One behind the highest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a group reads of a layer's cache."""

    place: slice | Tensor
    """Rows of the one segment, which lie one behind the other, or pages [B * M] of all."""
    first: int
    """Position of the first row that is read, a multiple of LANES."""
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


class Pass:
    """Where the rows of one pass stand, for every layer alike."""

    def __init__(self, segments: Sequence[Segment], table: PageTable, device: torch.device) -> None:
        """`table` has room for the segments behind what their slots hold."""
        self.groups: list[Group] = []
        self._table = table
        self._readings: dict[tuple[Group, int | None, int, torch.dtype], Reading] = {}
        self._singles: dict[Group, list[Group]] = {}
        rows: list[int] = []
        positions: list[int] = []
        for segment in segments:
            begin, num_tokens = table.lengths[segment.slot], len(segment.token_ids)
            rows += table.rows(segment.slot, num_tokens)
            positions += range(begin, begin + num_tokens)
        self.rows, self.positions = torch.from_numpy(np.array([rows, positions])).to(device)
        for num_tokens, members in groupby(range(len(segments)), key=lambda i: len(segments[i].token_ids)):
            slots = [segments[i].slot for i in members]
            first_row = self.groups[-1].rows.stop if self.groups else 0
            begins = [table.lengths[slot] for slot in slots]
            self.groups.append(_group(slots, begins, num_tokens, first_row, self.positions))

    def padded_positions(self, num_rows: int) -> Tensor:
        """Those of the rows, and zeros up to `num_rows` of them."""
        num_padding = num_rows - self.positions.shape[0]
        return F.pad(self.positions, (0, num_padding)) if num_padding else self.positions

    @property
    def num_pages(self) -> int:
        """That a cache must have room for."""
        return self._table.num_pages

    def parts(self, group: Group, values_per_token: int) -> list[Group]:
        """The group, or where a segment has many values of K, each of its segments, which are read in place."""
        if group.num_segments == 1 or group.end * values_per_token <= GATHERED_VALUES:
            return [group]
        if group not in self._singles:
            first, n = group.rows.start, group.num_tokens
            self._singles[group] = [
                _group([slot], [self._table.lengths[slot]], n, first + i * n, self.positions)
                for i, slot in enumerate(group.slot_ids)
            ]
        return self._singles[group]

    def reading(self, group: Group, window: int | None, heads_per_group: int, dtype: torch.dtype) -> Reading:
        """What `group` needs of a layer with this `window`, as a mask of `dtype`."""
        key = (group, window, heads_per_group, dtype)
        if key not in self._readings:
            first = 0 if window is None else max(0, group.begin - window + 1) // LANES * LANES
            place, first = self._place(group, first)
            rows = torch.arange(first, group.end, device=group.positions.device)
            distance = group.positions[:, :, None] - rows  # [B, n, C]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros(visible.shape, dtype=dtype, device=rows.device).masked_fill_(~visible, -torch.inf)
            self._readings[key] = Reading(
                place=place, first=first, num_rows=len(rows), mask=mask.repeat(1, heads_per_group, 1)[None]
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
        return torch.tensor(pages, device=self.rows.device), first_page * size


class SlotCache:
    """K and V of every attention layer, each [G, pages, tokens_per_page, D]: one slot's rows are neighbours."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.table = PageTable(num_slots)
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def bytes_per_token(self) -> int:
        """Of one sequence, over the layers that have seen a token."""
        return sum(x.shape[0] * x.shape[3] * x.element_size() for layer in self._layers.values() for x in layer)

    def store(self, layer: int, key: Tensor, value: Tensor, current: Pass) -> tuple[Tensor, Tensor]:
        """Writes rows key, value [1, G, R, D] to where `current` says; the layer's whole K and V."""
        if layer not in self._layers:
            self._layers[layer] = self._allocate(key, current), self._allocate(value, current)
        elif current.num_pages > self._layers[layer][0].shape[1]:
            k, v = self._layers[layer]
            self._layers[layer] = self._grow(k, current), self._grow(v, current)
        k, v = self._layers[layer]
        k.view(len(k), -1, k.shape[-1]).index_copy_(1, current.rows, key[0])
        v.view(len(v), -1, v.shape[-1]).index_copy_(1, current.rows, value[0])
        return k, v

    @torch.inference_mode()
    def clear(self, pages: Sequence[int]) -> None:
        """Makes zeros of pages that others have written."""
        if pages:
            index = torch.tensor(pages, device=self._device)
            for cache in (cache for layer in self._layers.values() for cache in layer):
                cache.index_fill_(1, index, 0)

    def _allocate(self, rows: Tensor, current: Pass) -> Tensor:
        num_pages = max(FIRST_PAGES, current.num_pages)
        shape = (rows.shape[1], num_pages, self.table.tokens_per_page, rows.shape[3])
        return zeros(shape, rows.dtype, self._device)

    def _grow(self, cache: Tensor, current: Pass) -> Tensor:
        return grown(cache, 1, current.num_pages, self.table.written)


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
    slot_cache: SlotCache,
    slot_pass: Pass,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, N, R, D], key and value [1, G, R, D] of the pass -> [1, R, N, D].

    The signature is transformers' own (5.23, AttentionInterface); `s_aux` [N] are gpt-oss's sinks, `softcap`
    is Gemma 2's. Rows behind those of the pass are padding, in and out.
    """
    num_rows, num_padded = len(slot_pass.positions), query.shape[2]
    query, key, value = query[:, :, :num_rows], key[:, :, :num_rows], value[:, :, :num_rows]
    layer: int = module.layer_idx  # type: ignore[assignment]
    k_cache, v_cache = slot_cache.store(layer, key, value, slot_pass)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    heads_per_group = query.shape[1] // len(k_cache)
    mixed = []
    for group in slot_pass.groups:
        for part in slot_pass.parts(group, key.shape[1] * key.shape[3]):
            reading = slot_pass.reading(part, sliding_window, heads_per_group, query.dtype)
            k, v = (reading.of(cache, part.num_segments) for cache in (k_cache, v_cache))
            q = _by_kv_head(query[0, :, part.rows], part, len(k_cache))
            if q.dtype == torch.bfloat16:
                sinks = None if s_aux is None else _sink_rows(s_aux, len(k), part.num_tokens)[:, None]
                rows = attend(q, k, v, reading.mask, scale, softcap, sinks, first=reading.first)
            else:
                rows = _attend(q, k, v, reading.mask, scale, softcap, s_aux, part.num_tokens)
            mixed.append(_by_row(rows, part))
    rows = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
    return F.pad(rows, (0, 0, 0, 0, 0, num_padded - num_rows))[None] if num_padded > num_rows else rows[None], None


AttentionInterface.register(IMPLEMENTATION, slot_attention)


def _group(slots: list[int], begins: Sequence[int], num_tokens: int, first_row: int, positions: Tensor) -> Group:
    """Segments of `slots` that hold `begins` tokens, from row `first_row` of the pass with `positions` [R]."""
    rows = slice(first_row, first_row + len(slots) * num_tokens)
    in_order = slots == list(range(slots[0], slots[0] + len(slots)))
    return Group(
        rows=rows,
        slot_ids=slots,
        slots=slice(slots[0], slots[-1] + 1) if in_order else torch.tensor(slots, device=positions.device),
        num_segments=len(slots),
        num_tokens=num_tokens,
        positions=positions[rows].view(len(slots), num_tokens),
        begin=min(begins),
        end=max(begins) + num_tokens,
    )


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
    sink = _sink_rows(sinks, len(scores), num_tokens).to(scores.dtype)[:, None, :, None]
    return torch.cat([scores, sink.expand(-1, scores.shape[1], -1, -1)], dim=-1).softmax(dim=-1)[..., :-1]


def _sink_rows(sinks: Tensor, num_groups: int, num_tokens: int) -> Tensor:
    """Of each row of a segment: sinks [N] -> [G, N/G * n]."""
    return sinks.reshape(num_groups, -1).repeat_interleave(num_tokens, dim=1)
