# SPDX-License-Identifier: Apache-2.0
"""Attention of packed rows over a cache of slots, as an attention implementation of transformers.

Each request keeps its K and V in rows 0 .. length of a slot; a pass carries the new tokens of all requests end to
end in one row dimension. Linear layers and experts so see one matrix, and no request is padded to another's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from dflash_trt.targets.target import Segment

IMPLEMENTATION = "slot_attention"  # transformers takes any name with "flash" in it for FlashAttention
INITIAL_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Neighbouring segments of equally many tokens, attended to together."""

    rows: slice
    """Of the pass."""
    slot_ids: list[int]
    slots: slice | Tensor
    """The same; a slice where they stand in order: then the cache is read in place."""
    num_segments: int
    num_tokens: int
    """n, of each segment."""
    positions: Tensor
    """[B, n]"""
    begin: int
    """The lowest position of the group."""
    end: int
    """One behind the highest."""


class Pass:
    """Where the rows of one pass stand, for every layer alike."""

    def __init__(self, segments: Sequence[Segment], lengths: Sequence[int], device: torch.device) -> None:
        """`lengths` are the tokens that each segment's slot already holds."""
        self.groups: list[Group] = []
        self._masks: dict[tuple[int, int | None], tuple[int, Tensor]] = {}
        slots: list[int] = []
        positions: list[int] = []
        for segment, begin in zip(segments, lengths, strict=True):
            slots += [segment.slot] * len(segment.token_ids)
            positions += range(begin, begin + len(segment.token_ids))
        self.slots, self.positions = torch.tensor([slots, positions], device=device)
        for num_tokens, members in groupby(range(len(segments)), key=lambda i: len(segments[i].token_ids)):
            begins = [(segments[i].slot, lengths[i]) for i in members]
            first_row = self.groups[-1].rows.stop if self.groups else 0
            self.groups.append(_group(begins, num_tokens, first_row, self.positions))

    def visible(self, index: int, window: int | None) -> tuple[int, Tensor]:
        """The first cache row that group `index` needs, and which rows from there each token sees [B, n, C]."""
        if (index, window) not in self._masks:
            group = self.groups[index]
            first = 0 if window is None else max(0, group.begin - window + 1)
            rows = torch.arange(first, group.end, device=group.positions.device)
            distance = group.positions[:, :, None] - rows  # [B, n, C]
            mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self._masks[index, window] = first, mask
        return self._masks[index, window]


class SlotCache:
    """K and V of every attention layer, each [slots, G, rows, D]; rows grow as sequences do."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots = num_slots
        self._device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def bytes_per_token(self) -> int:
        """Of one sequence, over the layers that have seen a token."""
        return sum(x.shape[1] * x.shape[3] * x.element_size() for layer in self._layers.values() for x in layer)

    def store(self, layer: int, key: Tensor, value: Tensor, current: Pass) -> tuple[Tensor, Tensor]:
        """Writes rows key, value [1, G, R, D] to their slots and positions; the layer's whole K and V."""
        num_rows = max(group.end for group in current.groups)
        if layer not in self._layers:
            self._layers[layer] = self._allocate(key, num_rows), self._allocate(value, num_rows)
        elif num_rows > self._layers[layer][0].shape[2]:
            k, v = self._layers[layer]
            self._layers[layer] = self._grow(k, num_rows), self._grow(v, num_rows)
        k, v = self._layers[layer]
        k[current.slots, :, current.positions] = key[0].transpose(0, 1)
        v[current.slots, :, current.positions] = value[0].transpose(0, 1)
        return k, v

    @torch.inference_mode()
    def clear(self, slot: int) -> None:
        """Zeros again: what a sequence left behind may be NaN, and 0 * NaN is NaN."""
        for rows in (cache[slot] for layer in self._layers.values() for cache in layer):
            rows.zero_()

    def _allocate(self, rows: Tensor, num_rows: int) -> Tensor:
        # Zeros, because a masked row still takes part as 0 * value.
        capacity = max(INITIAL_ROWS, num_rows)
        return torch.zeros(
            self._num_slots, rows.shape[1], capacity, rows.shape[3], dtype=rows.dtype, device=self._device
        )

    def _grow(self, old: Tensor, num_rows: int) -> Tensor:
        missing = max(num_rows, 2 * old.shape[2]) - old.shape[2]
        return F.pad(old, (0, 0, 0, missing))


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
    is Gemma 2's.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    k_cache, v_cache = slot_cache.store(layer, key, value, slot_pass)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    mixed = []
    for index, group in enumerate(slot_pass.groups):
        first, visible = slot_pass.visible(index, sliding_window)
        k, v = k_cache[group.slots, :, first : group.end], v_cache[group.slots, :, first : group.end]
        mixed.append(_attend(_by_segment(query[0, :, group.rows], group), k, v, visible, scale, softcap, s_aux))
    return (mixed[0] if len(mixed) == 1 else torch.cat(mixed))[None], None


AttentionInterface.register(IMPLEMENTATION, slot_attention)


def _group(begins: Sequence[tuple[int, int]], num_tokens: int, first_row: int, positions: Tensor) -> Group:
    """Segments of `begins` (slot, tokens before it) from row `first_row` of the pass with `positions` [R]."""
    slots = [slot for slot, _ in begins]
    rows = slice(first_row, first_row + len(begins) * num_tokens)
    in_order = slots == list(range(slots[0], slots[0] + len(slots)))
    return Group(
        rows=rows,
        slot_ids=slots,
        slots=slice(slots[0], slots[-1] + 1) if in_order else torch.tensor(slots, device=positions.device),
        num_segments=len(begins),
        num_tokens=num_tokens,
        positions=positions[rows].view(len(begins), num_tokens),
        begin=min(length for _, length in begins),
        end=max(length for _, length in begins) + num_tokens,
    )


def _by_segment(query: Tensor, group: Group) -> Tensor:
    """[N, B*n, D] -> [B, N, n, D]."""
    return query.reshape(len(query), group.num_segments, group.num_tokens, -1).transpose(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [B, N, n, D], k and v [B, G, C, D], visible [B, n, C] -> [B*n, N, D]."""
    heads, tokens, groups = q.shape[1], q.shape[2], k.shape[1]
    q = q.reshape(q.shape[0], groups, -1, q.shape[3])  # [B, G, N/G * n, D]: heads that share K and V are rows
    mask = visible.repeat(1, heads // groups, 1)[:, None]  # [B, 1, N/G * n, C]
    if sinks is None and softcap is None:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = q @ k.transpose(-1, -2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        mixed = _softmax(scores.masked_fill(~mask, -torch.inf), sinks, tokens) @ v
    return mixed.reshape(len(q), heads, tokens, -1).transpose(1, 2).flatten(0, 1)


def _softmax(scores: Tensor, sinks: Tensor | None, num_tokens: int) -> Tensor:
    """Softmax of scores [B, G, N/G * n, C]; a head's sink takes its share and carries no value."""
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype).reshape(1, scores.shape[1], -1, 1).repeat_interleave(num_tokens, dim=2)
    return torch.cat([scores, sink.expand(len(scores), -1, -1, -1)], dim=-1).softmax(dim=-1)[..., :-1]
