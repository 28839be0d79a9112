# SPDX-License-Identifier: Apache-2.0
"""A target that runs all requests in one pass, their rows end to end.

In BF16 the numbers of a token must not depend on what else is in its pass. A block and its tokens one by one are the
same sums in another order, whose rounding can flip a greedy choice. So the order is made the same, to the last bit, on
CPUs (oneDNN 3.12, torch 2.13; `agrees` tests this machine):

* Experts, and linear layers with long rows, have one kernel for any number of rows (the room `cpu/`). oneDNN and MKL
  compute one row on another kernel than two or more, and those all sum a row alike (`MIN_ROWS`: at 4, also MKL's in
  FP32, in which routers compute). So where a model has such products, a pass is padded with copies of its last row.
* Attention sums in the order of absolute positions (`cpu/paged_attention`).

On devices other than CPUs attention is computed by torch's operators.

Legend: B segments of a group, n tokens of each, R rows of a pass, C cached rows, N heads, G KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from dflash_trt.checkpoint.refusing import refusing
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for
from dflash_trt.runtime.kvcache.slot_cache import SlotCache
from dflash_trt.runtime.targets.delta_net import DeltaNets
from dflash_trt.runtime.targets.packed_pass import IMPLEMENTATION, AttentionRule, Group, Pass
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget, Taps
from dflash_trt.runtime.targets.target import Segment, Target, Verified


class _Reading(NamedTuple):
    """Pages and mask with which a group reads a layer's cache."""

    pages: Tensor
    """[B * M], the pages of each segment end to end."""
    mask: Tensor
    """[1, B, N/G * n, C]: 0 for a row that a token sees, else minus infinity; C rows of each segment are read."""

    def of(self, cache: Tensor) -> Tensor:
        """cache [G, pages, TOKENS_PER_PAGE, D] -> [G, B, C, D]."""
        rows = cache.index_select(1, self.pages).view(len(cache), self.mask.shape[1], -1, cache.shape[-1])
        return rows[:, :, : self.mask.shape[-1]]


class GatheredPass(Pass):
    """Pass over K and V [G, pages, TOKENS_PER_PAGE, D] that copies the pages of a group together."""

    reads_hidden_rows = True

    def __init__(self, segments: Sequence[Segment], cache: SlotCache, device: torch.device) -> None:
        super().__init__(segments, cache, device)
        self._readings: dict[tuple[Group, int | None, int, torch.dtype], _Reading] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        k_cache, v_cache = self._store(layer, key, value)
        num_kv_heads = len(k_cache)
        mixed = []
        for group in self.groups:
            reading = self._reading(group, rule.window, len(query) // num_kv_heads, query.dtype)
            q = _by_kv_head(query[:, group.rows], group, num_kv_heads)
            rows = _attend(q, reading.of(k_cache), reading.of(v_cache), reading.mask, rule, group.num_tokens)
            mixed.append(_by_row(rows, group))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new rows; the layer's whole K and V."""
        pages = (TOKENS_PER_PAGE, key.shape[-1]), (TOKENS_PER_PAGE, value.shape[-1])
        k, v = self._cache.layer(layer, len(key), *pages, key.dtype)
        k.view(len(k), -1, k.shape[-1]).index_copy_(1, self._rows, key)
        v.view(len(v), -1, v.shape[-1]).index_copy_(1, self._rows, value)
        return k, v

    @cached_property
    def _rows(self) -> Tensor:
        """[R], rows of the cache."""
        rows = (self._table.rows(slot, n) for slot, n in zip(self._slots, self._counts, strict=True))
        return torch.tensor([row for own in rows for row in own], device=self._device)

    def _reading(self, group: Group, window: int | None, heads_per_group: int, dtype: torch.dtype) -> _Reading:
        """Pages and mask for `group` in a layer with this `window`."""
        key = (group, window, heads_per_group, dtype)
        if key not in self._readings:
            first_page = 0 if window is None else max(0, group.begin - window + 1) // TOKENS_PER_PAGE
            rows = torch.arange(first_page * TOKENS_PER_PAGE, group.end, device=group.positions.device)
            distance = group.positions[:, :, None] - rows  # [B, n, C]
            visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros(visible.shape, dtype=dtype, device=rows.device).masked_fill_(~visible, -torch.inf)
            pages = torch.tensor(self._pages(group, first_page), device=self._device)
            self._readings[key] = _Reading(pages, mask.repeat(1, heads_per_group, 1)[None])
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


def _by_kv_head(query: Tensor, group: Group, num_groups: int) -> Tensor:
    """[N, B*n, D] -> [G, B, N/G * n, D]: heads that share K and V are rows."""
    heads = query.reshape(num_groups, -1, group.num_segments, group.num_tokens, query.shape[-1])
    return heads.transpose(1, 2).reshape(num_groups, group.num_segments, -1, query.shape[-1])


def _by_row(mixed: Tensor, group: Group) -> Tensor:
    """[G, B, N/G * n, D] -> [B*n, N, D]."""
    rows = mixed.reshape(len(mixed), group.num_segments, -1, group.num_tokens, mixed.shape[-1])
    return rows.permute(1, 3, 0, 2, 4).flatten(2, 3).flatten(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, rule: AttentionRule, num_tokens: int) -> Tensor:
    """q [G, B, N/G * n, D], k and v [G, B, C, D], mask [1, B, N/G * n, C] -> as q, with v's D."""
    if rule.sinks is None and rule.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=rule.scale)
    scores = q @ k.transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    return _softmax(scores + mask, rule.sinks, num_tokens) @ v


def _softmax(scores: Tensor, sinks: Tensor | None, num_tokens: int) -> Tensor:
    """Softmax of scores [G, B, N/G * n, C]; a head's sink takes its share and carries no value."""
    if sinks is None:
        return scores.softmax(dim=-1)
    rows = sinks.reshape(len(scores), -1).repeat_interleave(num_tokens, dim=1)  # [G, N/G * n]
    sink = rows.to(scores.dtype)[:, None, :, None]
    return torch.cat([scores, sink.expand(-1, scores.shape[1], -1, -1)], dim=-1).softmax(dim=-1)[..., :-1]


MIN_ROWS = 4
PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceleration:
    """Attention and padding of a target; by default torch's operators and transformers' layers, on any device."""

    pass_type: type[Pass] = GatheredPass
    """Class that computes attention."""
    pads_rows: bool = True
    """Whether passes in BF16 are filled up to a few numbers of rows, on which the kernels of linear layers agree."""


TORCH_OPERATORS = Acceleration()


class PackedTarget(HuggingFaceTarget):
    """All segments in one forward call, their rows end to end."""

    def __init__(
        self,
        model: PreTrainedModel,
        target_layer_ids: Sequence[int],
        num_slots: int,
        acceleration: Acceleration = TORCH_OPERATORS,
    ) -> None:
        """Replaces the model's attention; CheckpointError where its configuration keeps it from computing a token."""
        super().__init__(model, target_layer_ids)
        self._catcher = Taps(model, target_layer_ids)
        model.set_attn_implementation(IMPLEMENTATION)
        self._pads = model.dtype == torch.bfloat16 and acceleration.pads_rows
        self._pass_type = acceleration.pass_type
        self._cache = SlotCache(num_slots, model.device)
        self._delta_nets = DeltaNets(model, num_slots)
        self._table = self._cache.table
        with refusing(model.name_or_path, "a model that computes a token"):
            for token_ids in ([0], [0, 0]):
                self.verify([Segment(slot=0, token_ids=token_ids, num_logits=0)], with_taps=False)
        self.release(0)
        self.is_batch_invariant = model.dtype == torch.bfloat16 and self._agrees()
        self.cache_bytes_per_token = self._cache.bytes_per_token
        self.cache_bytes_per_slot = self._delta_nets.bytes_per_slot
        self.keeps_prefixes = self.cache_bytes_per_slot == 0  # recurrent state is of a sequence's end alone

    @torch.inference_mode()
    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """Appends all segments in one forward call."""
        self._delta_nets.apply_rollbacks()
        for segment in segments:
            self._clear(self._table.cover(segment.slot, len(segment.token_ids)))
        current = self._pass_type(segments, self._cache, self._device)
        token_ids: list[int] = []
        logits_rows: list[int] = []
        for segment in segments:
            token_ids += segment.token_ids
            logits_rows += range(len(token_ids) - segment.num_logits, len(token_ids))
        num_rows, num_logits = len(token_ids), len(logits_rows)
        if self._pads:
            token_ids += token_ids[-1:] * (self._size(num_rows) - num_rows)
            logits_rows += logits_rows[-1:] * (self._size(num_logits) - num_logits)
        verified = self._forward(
            token_ids,
            logits_rows,
            with_taps=with_taps,
            position_ids=current.padded_positions(len(token_ids))[None],
            use_cache=False,
            slot_pass=current,
        )
        for segment in segments:
            self._table.lengths[segment.slot] += len(segment.token_ids)
            self._delta_nets.appended(segment.slot, len(segment.token_ids))
        if not self._pads:
            return verified
        return Verified(logits=verified.logits[:num_logits], tapped=[tap[:, :num_rows] for tap in verified.tapped])

    def _computed(self) -> str:
        state = ", recurrent state replayed" if self._delta_nets.bytes_per_slot else ""
        return f"all requests in one pass, {self._pass_type.__name__} attention, paged cache{state}"

    def _agrees(self) -> bool:
        """Whether rows are independent; pads passes if that makes them so."""
        is_invariant = agrees(self)
        if not is_invariant and not self._pads:
            self._pads = True
            is_invariant = agrees(self)
        return is_invariant

    def _size(self, num_rows: int) -> int:
        """Padded number of rows of a pass."""
        return max(MIN_ROWS, padded_size(num_rows) if self._device.type == "cpu" else num_rows)

    def _clear(self, pages: Sequence[int]) -> None:
        """Zeros reused pages where the pass reads masked rows."""
        if self._pass_type.reads_hidden_rows:
            self._cache.clear(pages)

    def claim(self, user: object) -> bool:
        """Whether nobody but `user` has written pages since it last claimed them."""
        return self._table.claim(user)

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """The pages of an empty slot's sequence; the first `num_tokens` tokens are in them already."""
        self._clear(self._table.reserve(slot, pages, num_tokens))

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Shortens the sequence: rows behind it are overwritten by the next segment, recurrent state is replayed."""
        self._table.lengths[slot] -= num_tokens
        self._delta_nets.rollback(slot, num_tokens)

    def release(self, slot: int) -> None:
        """Empties a slot."""
        self._table.release(slot)
        self._delta_nets.clear(slot)


def padded_size(num_rows: int) -> int:
    """Rounds up to one of eight sizes per power of two, so by at most an eighth.

    oneDNN makes kernels for each number of rows times each shape of a weight, 0.3 to 0.6 MiB each at 128 x 256, and
    keeps a thousand.
    """
    step = 1 << max(0, (num_rows - 1).bit_length() - 4)
    return -(-num_rows // step) * step


def agrees(target: Target) -> bool:
    """Whether logits of some tokens in one block equal those of one token a pass, to the last bit; on an empty target.

    Not on kernels that sum otherwise, nor in gated delta nets, which compute a block by another formula than a token.
    """

    def logits_of(begin: int, end: int) -> Tensor:
        segment = Segment(slot=0, token_ids=range(begin, end), num_logits=end - begin)
        logits = target.verify([segment], with_taps=False).logits
        target.rollback(0, 0)
        return logits

    one_by_one = torch.cat([logits_of(i, i + 1) for i in range(PROBE_TOKENS)])
    target.release(0)
    together = logits_of(0, PROBE_TOKENS)
    target.release(0)
    return torch.equal(one_by_one, together)
