# SPDX-License-Identifier: Apache-2.0
"""One pair on many ranks: each holds a shard of the target and the whole drafter, rank 0 decides.

Only commands travel, a few integers each. Behind the target's all-reduces every rank has the same hidden states, so
taps need not travel and each drafter makes its own context; what rank 0 drafted comes back in its next `verify`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import islice
from pathlib import Path

import msgspec
import torch
import transformers

from dflash_trt import __version__
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.engine.manifest import MANIFEST, sha256
from dflash_trt.runtime.pair import Pair
from dflash_trt.runtime.ranks.roles import Follower, Leader
from dflash_trt.targets.target import Segment


class Op(IntEnum):
    """What a command does."""

    DRAFT = 0
    """number of tokens, slots, then as many anchors"""
    VERIFY = 1
    """of each segment: slot, num_logits, number of tokens, tokens"""
    COMMIT = 2
    """num_tokens"""
    RELEASE = 3
    """the slot"""
    RESERVE = 4
    """slot, number of tokens that are there, pages"""
    CATCH_UP = 5
    """nothing"""


class TensorParallelPair:
    """Rank 0's pair: whatever it does, all ranks do."""

    def __init__(self, leader: Leader, local: Pair, index: int = 0) -> None:
        """`local` is this rank's own pair, and stands at `index` of the pairs that the others follow with."""
        self._leader = leader
        self._local = local
        self._index = index

    def claim(self) -> bool:
        """Rank 0's answer: the others do what it does, in the same order."""
        return self._local.claim()

    def num_written(self, slot: int) -> int:
        """The same on all ranks."""
        return self._local.num_written(slot)

    def catch_up(self) -> None:
        """Brings all ranks' contexts up to date."""
        self._send(Op.CATCH_UP)
        self._local.catch_up()

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        """The same pages on all ranks: rank 0 alone decides who holds which."""
        self._send(Op.RESERVE, slot, num_tokens, *pages)
        self._local.reserve(slot, pages, num_tokens)

    def draft(self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int) -> list[list[int]]:
        """Rank 0's proposals [B, num_tokens]."""
        self._send(Op.DRAFT, num_tokens, *slots, *anchors)
        return self._local.draft(slots, anchors, num_tokens)

    def verify(self, segments: Sequence[Segment]) -> torch.Tensor:
        """One pass of the target on all ranks; logits [sum of num_logits, V] FLOAT."""
        self._send(Op.VERIFY, *_encode(segments))
        return self._local.verify(segments)

    def commit(self, num_tokens: Sequence[int]) -> None:
        """Commits on all ranks."""
        self._send(Op.COMMIT, *num_tokens)
        self._local.commit(num_tokens)

    def release(self, slot: int) -> None:
        """Empties a slot on all ranks."""
        self._send(Op.RELEASE, slot)
        self._local.release(slot)

    def _send(self, op: Op, *numbers: int) -> None:
        self._leader.send([self._index, op, *numbers])


def follow(follower: Follower, pairs: Sequence[Pair]) -> None:
    """Does with this rank's `pairs` what rank 0 does with its own, until rank 0 has finished."""
    while (command := follower.receive()) is not None:
        index, op, *numbers = command
        _execute(pairs[index], Op(op), numbers)


def rank_facts(engine: Path, target: TargetCheckpoint) -> dict[str, str]:
    """What must be the same on every rank. Of the target's weights the headers are compared, not the values."""
    weights = [(tensor.name, tensor.dtype, tensor.shape) for tensor in target.weights.values()]
    return {
        "version of dflash-trt": __version__,
        "version of torch": torch.__version__,
        "version of transformers": transformers.__version__,
        "sha256 of the engine's manifest.json": sha256(engine / MANIFEST),
        "sha256 of the target's config.json": sha256(target.directory / "config.json"),
        "sha256 of the target's tensor names and shapes": hashlib.sha256(msgspec.json.encode(weights)).hexdigest(),
    }


def _execute(pair: Pair, op: Op, numbers: Sequence[int]) -> None:
    if op is Op.DRAFT:
        num_tokens, *rest = numbers
        half = len(rest) // 2
        pair.draft(rest[:half], rest[half:], num_tokens)
    elif op is Op.VERIFY:
        pair.verify(list(_decode(numbers)))
    elif op is Op.COMMIT:
        pair.commit(numbers)
    elif op is Op.CATCH_UP:
        pair.catch_up()
    elif op is Op.RESERVE:
        slot, num_tokens, *pages = numbers
        pair.reserve(slot, pages, num_tokens)
    else:
        pair.release(numbers[0])


def _encode(segments: Sequence[Segment]) -> Iterator[int]:
    for segment in segments:
        yield from (segment.slot, segment.num_logits, len(segment.token_ids), *segment.token_ids)


def _decode(numbers: Sequence[int]) -> Iterator[Segment]:
    rest = iter(numbers)
    for slot in rest:
        num_logits, num_tokens = next(rest), next(rest)
        yield Segment(slot=slot, token_ids=list(islice(rest, num_tokens)), num_logits=num_logits)
