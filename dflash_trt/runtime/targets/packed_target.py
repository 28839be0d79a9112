# SPDX-License-Identifier: Apache-2.0
"""A target that runs all requests in one pass, their rows end to end.

In BF16 the numbers of a token must not depend on what else is in its pass. A block and its tokens one by one are the
same sums in another order, whose rounding can flip a greedy choice. So the order is made the same, to the last bit, on
CPUs (oneDNN 3.12, torch 2.13; `agrees` tests this machine):

* Experts, and linear layers with long rows, have one kernel for any number of rows (the room `cpu/`). oneDNN and MKL
  compute one row on another kernel than two or more, and those all sum a row alike (`MIN_ROWS`: at 4, also MKL's in
  FP32, in which routers compute). So where a model has such products, a pass is padded with copies of its last row.
* Attention sums in the order of absolute positions (`cpu/accelerate`).

On devices other than CPUs attention is computed by torch's operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_trt.checkpoint.tokenizer import refusing
from dflash_trt.device.launcher import Launcher
from dflash_trt.runtime.kvcache.slot_cache import SlotCache
from dflash_trt.runtime.targets.delta_net import DeltaNets
from dflash_trt.runtime.targets.packed_pass import IMPLEMENTATION, CurrentPass, GatheredPass, RaggedPass
from dflash_trt.runtime.targets.recorded_pass import PassSize, RecordedPasses, StaticPass
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget, Taps
from dflash_trt.runtime.targets.target import Segment, Target, Verified

MIN_ROWS = 4
PROBE_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceleration:
    """Attention and padding of a target; by default torch's operators and transformers' layers, on any device."""

    pass_type: type[RaggedPass] = GatheredPass
    """Class that computes attention."""
    pads_rows: bool = True
    """Whether a CPU fills passes in BF16 up to a few numbers of rows, on which the kernels of linear layers agree."""


TORCH_OPERATORS = Acceleration()


class PackedTarget(HuggingFaceTarget):
    """All segments in one forward call, their rows end to end."""

    def __init__(
        self,
        model: PreTrainedModel,
        target_layer_ids: Sequence[int],
        num_slots: int,
        acceleration: Acceleration = TORCH_OPERATORS,
        launcher: Launcher | None = None,
    ) -> None:
        """Replaces the model's attention; CheckpointError where its configuration keeps it from computing a token.

        With a `launcher`, decoding passes are recorded, unless there is recurrent state, which Python updates.
        """
        super().__init__(model, target_layer_ids)
        self._catcher = Taps(model, target_layer_ids)
        model.set_attn_implementation(IMPLEMENTATION)
        self._may_pad = self._device.type == "cpu" and model.dtype == torch.bfloat16
        self._pads = self._may_pad and acceleration.pads_rows
        self._pass_type = acceleration.pass_type
        self.cache = SlotCache(num_slots, model.device)
        self._delta_nets = DeltaNets(model, num_slots)
        self._table = self.cache.table
        self.recorded: RecordedPasses | None = None
        with refusing(model.name_or_path, "a model that computes a token"):
            for num_tokens in (1, 2):  # torch.compile makes kernels for one row, and for any other number
                self.verify([Segment(slot=0, token_ids=[0] * num_tokens, num_logits=0)], with_taps=False)
        self.release(0)
        if launcher is not None and not self._delta_nets.bytes_per_slot:
            self.recorded = RecordedPasses(self._run_static, self.cache, launcher, model.name_or_path)
        self.is_batch_invariant = model.dtype == torch.bfloat16 and self._agrees()
        self.cache_bytes_per_token = self.cache.bytes_per_token
        self.cache_bytes_per_slot = self._delta_nets.bytes_per_slot
        self.keeps_prefixes = self.cache_bytes_per_slot == 0  # recurrent state is of a sequence's end alone

    @property
    def recorded_sizes(self) -> list[PassSize]:
        """Sizes of the recorded passes, the last used at the end; empty if passes are launched kernel by kernel."""
        return [] if self.recorded is None else self.recorded.sizes

    def close(self) -> None:
        if self.recorded is not None:
            self.recorded.close()
        super().close()

    @torch.inference_mode()
    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """Appends all segments in one forward call."""
        self._delta_nets.apply_rollbacks()
        for segment in segments:
            self._clear(self._table.cover(segment.slot, len(segment.token_ids)))
        verified = None if self.recorded is None else self.recorded.verify(segments, with_taps=with_taps)
        if verified is None:
            verified = self._launch(segments, with_taps=with_taps)
        for segment in segments:
            self._table.lengths[segment.slot] += len(segment.token_ids)
            self._delta_nets.appended(segment.slot, len(segment.token_ids))
        return verified

    def _run_static(self, current: StaticPass, with_taps: bool) -> Verified:
        """The model's forward call over a pass of fixed sizes."""
        inputs = {"position_ids": current.positions[None], "use_cache": False, "slot_pass": CurrentPass(current)}
        return self._run(current.token_ids[None], 0, with_taps=with_taps, **inputs)

    def _launch(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """The pass in any sizes, kernel by kernel."""
        current = self._pass_type(segments, self.cache, self._device)
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
            slot_pass=CurrentPass(current),
        )
        if not self._pads:
            return verified
        return Verified(logits=verified.logits[:num_logits], tapped=[tap[:, :num_rows] for tap in verified.tapped])

    def _computed(self) -> str:
        state = ", recurrent state replayed" if self._delta_nets.bytes_per_slot else ""
        graphs = ", CUDA graphs" if self.recorded is not None and self.recorded.works else ""
        return f"all requests in one pass, {self._pass_type.attention}, paged cache{state}{graphs}"

    def _agrees(self) -> bool:
        """Whether rows are independent; pads passes if that makes them so."""
        is_invariant = agrees(self)
        if not is_invariant and self._may_pad and not self._pads:
            self._pads = True
            is_invariant = agrees(self)
        return is_invariant

    def _size(self, num_rows: int) -> int:
        """Padded number of rows of a pass."""
        return max(MIN_ROWS, padded_size(num_rows))

    def _clear(self, pages: Sequence[int]) -> None:
        """Zeros reused pages where the pass reads masked rows."""
        if self._pass_type.reads_hidden_rows:
            self.cache.clear(pages)

    def allocate(self, num_pages: int) -> None:
        """Allocates a GPU's memory for `num_pages` pages; recorded passes are dropped when the caches move."""
        if self._device.type != "cpu":
            self.cache.make_room(num_pages)

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """The pages of an empty slot's sequence; the first `num_tokens` tokens are in them already."""
        self._clear(self._table.reserve(slot, pages, num_tokens))

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Shortens the sequence: the next segment overwrites later rows, recurrent state is replayed."""
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
