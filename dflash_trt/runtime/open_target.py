# SPDX-License-Identifier: Apache-2.0
"""Opens the target of a command, on one process or on ranks that share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from traceback import clear_frames
from typing import Any

import torch

from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.errors import CheckpointError, first_line
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.ranks.roles import Follower, Leader
from dflash_trt.runtime.ranks.sharded_target import ShardedTarget, follow
from dflash_trt.runtime.ranks.sharding import sharding, target_facts
from dflash_trt.runtime.targets.huggingface import load_model, make_target
from dflash_trt.runtime.targets.runnable import target_dtype
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget


def prepare_target(
    checkpoint: TargetCheckpoint,
    target_layer_ids: Sequence[int],
    num_slots: int,
    ranks: Leader | Follower,
    *,
    dtype: str,
    device: str,
    tap_hidden_size: int | None = None,
) -> Callable[[], HuggingFaceTarget]:
    """Runs all checks that need no weights; the returned function loads the target for `num_slots` sequences.

    `device` is "cpu" or "cuda". With several `ranks`, only rank 0 returns from here, if all facts agree: the others
    load their shards, follow rank 0 until it has finished, and then leave `join`. Raises the errors of `target_dtype`,
    `sharding` and `verify_same_facts`; the function raises CheckpointError for problems that only loading reveals.
    """
    target_dtype(dtype, checkpoint.directory, checkpoint.weights)
    options: dict[str, Any] = {"device": device}
    if ranks.size > 1:
        asked = {"target_layer_ids": target_layer_ids, "requests at once": num_slots, "dtype": dtype, "device": device}
        ranks.verify_same_facts(target_facts(checkpoint) | {name: str(value) for name, value in asked.items()})
        options |= {"distributed_config": sharding(checkpoint.directory, ranks.size), "num_ranks": ranks.size}

    def load() -> HuggingFaceTarget:
        try:
            return make_target(
                load_model(checkpoint.directory, checkpoint.spec, target_layer_ids, dtype=dtype, **options),
                target_layer_ids, num_slots, accelerate, tap_hidden_size=tap_hidden_size,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            clear_frames(error.__traceback__)  # they hold the model, and our error them: the next try needs its memory
            raise CheckpointError(
                f"{checkpoint.directory}: expected GPU memory to load the target and compute tokens, found too little"
                f" ({first_line(error)})",
                hint="--dtype bfloat16 halves what float32 takes; else take a larger GPU, or more of them (--tp)",
            ) from None

    if isinstance(ranks, Follower):
        follow(ranks, load())
    return load if ranks.size == 1 else lambda: ShardedTarget(load(), ranks)
