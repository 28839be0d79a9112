# SPDX-License-Identifier: Apache-2.0
"""One runner on many ranks: each holds a shard of the target and the whole drafter, and rank 0 decides.

Only commands travel, a few integers each. Behind the target's all-reduces every rank has the same hidden states, so
taps need not travel and each drafter makes its own context; what rank 0 drafted comes back in its next `verify`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import torch

from dflash_trt.runtime.drafter.candidate_selector import Draw, Proposals
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.ranks.roles import Follower, Leader
from dflash_trt.runtime.targets.target import Segment, Target

Method = Literal["catch_up", "reserve", "draft", "verify", "commit", "release"]


class Command(msgspec.Struct, array_like=True, frozen=True):
    """Call of one runner of rank 0, which the other ranks repeat on theirs."""

    runner: int
    method: Method
    arguments: Sequence[int | Sequence[int | Segment]]


_DECODER = msgspec.msgpack.Decoder(Command)


class TensorParallelRunner(ModelRunner):
    """Runner of rank 0, whose calls all ranks repeat; what it answers is rank 0's, which alone draws."""

    def __init__(self, leader: Leader, target: Target, drafter: Drafter | None, index: int) -> None:
        """`index` is its place among the runners of each of the other ranks."""
        super().__init__(target, drafter)
        self._leader = leader
        self._index = index

    def catch_up(self) -> None:
        self._send("catch_up")
        super().catch_up()

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        self._send("reserve", slot, pages, num_tokens)
        super().reserve(slot, pages, num_tokens)

    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], draft_length: int, draws: Sequence[Draw | None] = ()
    ) -> list[Proposals]:
        self._send("draft", slots, anchors, draft_length)
        return super().draft(slots, anchors, draft_length, draws)

    def verify(self, segments: Sequence[Segment]) -> torch.Tensor:
        self._send("verify", segments)
        return super().verify(segments)

    def commit(self, num_tokens: Sequence[int]) -> None:
        self._send("commit", num_tokens)
        super().commit(num_tokens)

    def release(self, slot: int) -> None:
        self._send("release", slot)
        super().release(slot)

    def _send(self, method: Method, *arguments: int | Sequence[int] | Sequence[Segment]) -> None:
        command = Command(self._index, method, arguments)
        self._leader.send(msgspec.msgpack.encode(command, enc_hook=_plain))


def follow(follower: Follower, runners: Sequence[ModelRunner]) -> None:
    """Repeats on this rank's `runners` the calls of rank 0, until rank 0 has finished."""
    while (message := follower.receive()) is not None:
        command = _DECODER.decode(message)
        getattr(runners[command.runner], command.method)(*command.arguments)


def _plain(value: Any) -> int | list[int]:
    """Converts numpy's integers, ranges and other sequences for msgpack."""
    return list(value) if isinstance(value, Sequence) else operator.index(value)
