# SPDX-License-Identifier: Apache-2.0
"""One target on many ranks: each holds a shard and repeats the calls that rank 0 makes on its own.

Only calls travel, a few integers each, and the hidden states that the lm_head is asked about. After the target's
all-reduces every rank has the same logits and taps; only rank 0 uses them, for a drafter or a file.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import msgspec
import torch
from torch import Tensor, distributed

from dflash_trt.runtime.ranks.roles import Followed, Follower, Leader
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment, Verified

Method = Literal["reserve", "verify", "rollback", "release", "embed", "logits", "head"]


class Call(msgspec.Struct, array_like=True, frozen=True):
    """Call of rank 0's target, which the other ranks repeat on theirs."""

    method: Method
    arguments: dict[str, int | bool | Sequence[int | Segment]]
    shape: Sequence[int] | None = None
    """Shape of the tensor that rank 0 broadcasts for it."""

    def run(self, target: HuggingFaceTarget, values: Tensor | None = None) -> Any:
        """Calls `target`; `values` is the tensor where this is rank 0."""
        method = getattr(target, self.method)
        if self.shape is None:
            return method(**self.arguments)
        dtype = torch.int64 if self.method == "embed" else target.model.dtype
        if values is None:
            values = torch.empty(tuple(self.shape), dtype=dtype, device=target.model.device)
        values = values.to(target.model.device, dtype).contiguous()
        distributed.broadcast(values, 0)
        return method(values)


_DECODER = msgspec.msgpack.Decoder(list[Call])


class ShardedTarget(HuggingFaceTarget):
    """Target of rank 0, whose calls all ranks repeat; what has no result is done, and sent, with the next that has."""

    def __init__(self, shard: HuggingFaceTarget, leader: Leader) -> None:
        super().__init__(shard.model, shard.target_layer_ids, shard.tap_hidden_size)
        self.is_batch_invariant, self.keeps_prefixes = shard.is_batch_invariant, shard.keeps_prefixes
        self.cache_bytes_per_token, self.cache_bytes_per_slot = shard.cache_bytes_per_token, shard.cache_bytes_per_slot
        self._shard, self._leader = shard, leader
        self._later: list[Call] = []

    @property
    def summary(self) -> str:
        """One line: rank 0's shard, and how many there are."""
        return f"{self._shard.summary}, one of {self._leader.size} ranks"

    def close(self) -> None:
        self._shard.close()
        vars(self).clear()

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        self._later.append(Call("reserve", {"slot": slot, "pages": [*pages], "num_tokens": num_tokens}))

    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        plain = [Segment(segment.slot, segment.token_ids, segment.num_logits) for segment in segments]
        verified: Verified = self._call("verify", {"segments": plain, "with_taps": with_taps})
        return verified

    def rollback(self, slot: int, num_tokens: int) -> None:
        self._later.append(Call("rollback", {"slot": slot, "num_tokens": num_tokens}))

    def release(self, slot: int) -> None:
        self._later.append(Call("release", {"slot": slot}))

    def embed(self, token_ids: Tensor) -> Tensor:
        rows: Tensor = self._call("embed", {}, token_ids)
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._call("logits", {}, hidden)
        return logits

    def head(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = self._call("head", {})
        return tensors

    def _call(self, method: Method, arguments: dict[str, Any], values: Tensor | None = None) -> Any:
        call = Call(method, arguments, None if values is None else values.shape)
        before, self._later = self._later, []
        self._leader.send(msgspec.msgpack.encode([*before, call], enc_hook=_plain))
        for earlier in before:
            earlier.run(self._shard)
        return call.run(self._shard, values)


def follow(follower: Follower, target: HuggingFaceTarget) -> NoReturn:
    """Repeats on this rank's `target` the calls of rank 0 until it has finished; then Followed leaves `join`."""
    while (message := follower.receive()) is not None:
        for call in _DECODER.decode(message):
            call.run(target)
    raise Followed


def _plain(value: Any) -> int | list[int]:
    """Converts numpy's integers, ranges, shapes and other sequences for msgpack."""
    return list(value) if isinstance(value, Sequence) else operator.index(value)
