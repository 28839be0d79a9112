# SPDX-License-Identifier: Apache-2.0
"""The rows of one pass, the new tokens of all requests end to end, and attention over them by torch's operators.

Legend: B segments of a group, n tokens of each, R rows, C cached rows, N heads, G KV heads, D head_dim, E that of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_trt.device.fused import Fused
from dflash_trt.device.upload import uploaded
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for
from dflash_trt.runtime.kvcache.slot_cache import SlotCache
from dflash_trt.runtime.targets.target import Segment

MAX_PAGES = 4096
"""Pages that are copied together, of all segments that are computed together; one alone may have more."""


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
    """Interface between attention and a pass, the same for every layer; subclasses implement the computation."""

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
    """Name of the implementation, for messages."""
    reads_hidden_rows: ClassVar[bool] = False
    """Whether masked rows still take part as 0 * value, so that they must not be NaN."""

    def __init__(self, segments: Sequence[Segment], cache: SlotCache, device: torch.device) -> None:
        """The cache's table must have room for the segments after their slots' contents."""
        self._cache, self._table, self._device = cache, cache.table, device
        self._slots = [segment.slot for segment in segments]
        self._counts = [len(segment.token_ids) for segment in segments]
        self._begins = [cache.table.lengths[slot] for slot in self._slots]
        spans = (range(begin, begin + n) for begin, n in zip(self._begins, self._counts, strict=True))
        self.positions = uploaded(torch.from_numpy(np.array([*chain.from_iterable(spans)])), device)

    def padded_positions(self, num_rows: int) -> Tensor:
        """Positions of the rows, padded with zeros to `num_rows`."""
        num_padding = num_rows - self.positions.shape[0]
        return F.pad(self.positions, (0, num_padding)) if num_padding else self.positions

    @cached_property
    def groups(self) -> list[Group]:
        """All segments, as few groups as their order allows."""
        groups: list[Group] = []
        for num_tokens, members in groupby(range(len(self._slots)), key=self._counts.__getitem__):
            for part in self._parts(list(members)):
                first_row = groups[-1].rows.stop if groups else 0
                groups.append(self._group(part, num_tokens, first_row))
        return groups

    def _parts(self, members: list[int]) -> list[list[int]]:
        """Neighbouring segments of one length in the parts that are computed together: all of them."""
        return [members]

    def _group(self, members: list[int], num_tokens: int, first_row: int) -> Group:
        """Segments `members`, from row `first_row` of the pass."""
        rows = slice(first_row, first_row + len(members) * num_tokens)
        slots, begins = [self._slots[i] for i in members], [self._begins[i] for i in members]
        in_order = slots == list(range(slots[0], slots[0] + len(slots)))
        return Group(
            rows=rows,
            slot_ids=slots,
            slots=slice(slots[0], slots[-1] + 1) if in_order else uploaded(torch.tensor(slots), self._device),
            num_segments=len(slots),
            num_tokens=num_tokens,
            positions=self.positions[rows].view(len(slots), num_tokens),
            begin=min(begins),
            end=max(begins) + num_tokens,
        )


@dataclass(frozen=True, slots=True)
class CurrentPass:
    """The pass of a forward call, in one type for all: torch.compile compiles anew for another type of an argument."""

    value: Pass


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
    slot_pass: CurrentPass,
    **_: object,
) -> tuple[Tensor, None]:
    """query [1, N, R, D], key and value [1, G, R, D] of the pass -> [1, R, N, D].

    transformers' own signature (5.23, AttentionInterface); `s_aux` [N] are gpt-oss's sinks, `softcap` is Gemma 2's.
    Rows after those of the pass are padding, in input and output.
    """
    current, num_padded = slot_pass.value, query.shape[2]
    num_rows = len(current.positions)
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (x[0, :, :num_rows] for x in (query, key, value))
    rows = current.attend(layer, query, key, value, AttentionRule(scale, sliding_window, softcap, s_aux)).contiguous()
    return F.pad(rows, (0, 0, 0, 0, 0, num_padded - num_rows))[None] if num_padded > num_rows else rows[None], None


AttentionInterface.register(IMPLEMENTATION, slot_attention)


class Reading(NamedTuple):
    """Pages and mask with which a group reads a layer's cache."""

    pages: Tensor
    """[B * M], the pages of each segment end to end."""
    mask: Tensor
    """[1, B, N/G * n, C]: 0 for a row that a token sees, else minus infinity; the C rows of M pages are read."""

    def of(self, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
        """K and V [G, pages, TOKENS_PER_PAGE, D] -> [G, B, C, D] each."""
        k, v = _gathered(k_cache, v_cache, self.pages)
        shape = len(k), self.mask.shape[1], -1
        return k.view(*shape, k.shape[-1]), v.view(*shape, v.shape[-1])


@Fused
def _gathered(k_cache: Tensor, v_cache: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the `pages` [P] of K and V [G, pages, ...]."""
    return k_cache.index_select(1, pages), v_cache.index_select(1, pages)


def attention_mask(visible: Tensor, heads_per_group: int, dtype: torch.dtype) -> Tensor:
    """Mask added to the scores: visible [B, n, C] -> [1, B, N/G * n, C]."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
    return mask.repeat(1, heads_per_group, 1)[None]


def store_rows(cache: SlotCache, layer: int, key: Tensor, value: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Writes key [G, R, D] and value [G, R, E] to `rows` [R] of a layer's cache; its whole K and V."""
    pages = (TOKENS_PER_PAGE, key.shape[-1]), (TOKENS_PER_PAGE, value.shape[-1])
    k, v = cache.layer(layer, len(key), *pages, key.dtype)
    _write(k.view(len(k), -1, k.shape[-1]), v.view(len(v), -1, v.shape[-1]), rows, key, value)
    return k, v


@Fused
def _write(k: Tensor, v: Tensor, rows: Tensor, key: Tensor, value: Tensor) -> None:
    """Writes key [G, R, D] and value [G, R, E] to `rows` [R] of k [G, C, D] and v [G, C, E]."""
    k.index_copy_(1, rows, key)
    v.index_copy_(1, rows, value)


class GatheredPass(RaggedPass):
    """Pass over K and V [G, pages, TOKENS_PER_PAGE, D] that copies the pages of a group together, on any device."""

    attention = "torch's attention"
    reads_hidden_rows = True

    def __init__(self, segments: Sequence[Segment], cache: SlotCache, device: torch.device) -> None:
        super().__init__(segments, cache, device)
        self._readings: dict[tuple[Group, int | None, int, torch.dtype], Reading] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        k_cache, v_cache = store_rows(self._cache, layer, key, value, self._rows)
        num_kv_heads = len(k_cache)
        mixed = []
        for group in self.groups:
            reading = self._reading(group, rule.window, len(query) // num_kv_heads, query.dtype)
            mixed.append(attend_rows(query[:, group.rows], k_cache, v_cache, reading, rule, group.num_tokens))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _parts(self, members: list[int]) -> list[list[int]]:
        """At most MAX_PAGES of the longest sequence for each segment of a part."""
        parts, longest = [members[:1]], 0
        pages = [num_pages_for(begin + n) for begin, n in zip(self._begins, self._counts, strict=True)]
        for before, member in pairwise(members):
            longest = max(longest, pages[before], pages[member])
            if longest * (len(parts[-1]) + 1) > MAX_PAGES:
                parts.append([])
                longest = pages[member]
            parts[-1].append(member)
        return parts

    @cached_property
    def _rows(self) -> Tensor:
        """[R], rows of the cache."""
        rows = (self._table.rows(slot, n) for slot, n in zip(self._slots, self._counts, strict=True))
        return uploaded(torch.tensor([row for own in rows for row in own]), self._device)

    def _reading(self, group: Group, window: int | None, heads_per_group: int, dtype: torch.dtype) -> Reading:
        """Pages and mask for `group` in a layer with this `window`."""
        key = (group, window, heads_per_group, dtype)
        if key not in self._readings:
            first_page = 0 if window is None else max(0, group.begin - window + 1) // TOKENS_PER_PAGE
            end = num_pages_for(group.end) * TOKENS_PER_PAGE  # torch would copy a ragged mask for each KV head
            rows = torch.arange(first_page * TOKENS_PER_PAGE, end, device=group.positions.device)
            distance = group.positions[:, :, None] - rows  # [B, n, C]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            pages = uploaded(torch.tensor(self._pages(group, first_page)), self._device)
            self._readings[key] = Reading(pages, attention_mask(visible, heads_per_group, dtype))
        return self._readings[key]

    def _pages(self, group: Group, first_page: int) -> list[int]:
        """Equally many pages of each segment, up to the group's last position."""
        end_page = num_pages_for(group.end)
        pages: list[int] = []
        for slot in group.slot_ids:
            held = num_pages_for(self._table.lengths[slot] + group.num_tokens)
            own = self._table.pages[slot][first_page : min(held, end_page)]
            # A shorter sequence is filled up with a page of its own: no token sees it, and never a NaN of another.
            pages += own + [self._table.pages[slot][0]] * (end_page - first_page - len(own))
        return pages


def attend_rows(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, reading: Reading, rule: AttentionRule, num_tokens: int
) -> Tensor:
    """query [N, B*n, D] over the rows that `reading` takes of K and V [G, pages, TOKENS_PER_PAGE, D] -> [B*n, N, D].

    Heads that share K and V are rows of one product.
    """
    num_groups, num_segments, head_dim = len(k_cache), reading.mask.shape[1], query.shape[-1]
    heads = query.reshape(num_groups, -1, num_segments, num_tokens, head_dim).transpose(1, 2)
    q = heads.reshape(num_groups, num_segments, -1, head_dim)
    mixed = _attend(q, *reading.of(k_cache, v_cache), reading.mask, rule)
    rows = mixed.reshape(num_groups, num_segments, -1, num_tokens, mixed.shape[-1])
    return rows.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: AttentionRule) -> Tensor:
    """q [G, B, N/G * n, D], k and v [G, B, C, D], mask [1, B, N/G * n, C] -> as q, with v's D."""
    if rule.sinks is None and rule.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale)
    weights: Tensor = _softmax(q @ k.transpose(-1, -2), mask, *rule)
    return weights @ v


@Fused
def _softmax(
    scores: Tensor, mask: Tensor, scale: float, _: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Softmax in FP32 of scores [G, B, N/G * n, C]; a head's sink takes its share and carries no value."""
    dtype, scores = scores.dtype, scores.float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is None:
        return scores.softmax(dim=-1).to(dtype)
    heads = sinks.float().view(len(scores), 1, -1, 1)  # [G, 1, N/G, 1]
    sink = heads.repeat_interleave(scores.shape[2] // heads.shape[2], dim=2)
    top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    shares = (scores - top).exp()
    return (shares / (shares.sum(dim=-1, keepdim=True) + (sink - top).exp())).to(dtype)
