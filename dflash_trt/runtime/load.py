# SPDX-License-Identifier: Apache-2.0
"""From an engine directory and its target to a session: what is loaded, where, and in how much memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions
from dflash_trt.errors import MissingDependencyError, RequestError, cut
from dflash_trt.runtime.checked_pair import CheckedPair, default_batch_size
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.draft_length import parse_draft_length
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.ranks.parallel_pair import rank_facts
from dflash_trt.runtime.ranks.roles import Follower, Leader
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.dtype import target_dtype
from dflash_trt.runtime.targets.huggingface import load_model, make_target, stop_token_ids
from dflash_trt.runtime.targets.sharding import sharding

LOG = logging.getLogger("dflash_trt.runtime")
NEW_LINE = "\n"


def open_session(engine: Path, target_name: str, options: RuntimeOptions = DEFAULTS) -> Session:
    """Reads and loads both; raises what `CheckedPair.read` and `load_session` raise."""
    return load_session(CheckedPair.read(engine, target_name), options)


def load_session(
    pair: CheckedPair,
    options: RuntimeOptions = DEFAULTS,
    *,
    expose: Sequence[str] = (),
    ranks: Leader | Follower | None = None,
) -> Session:
    """Loads both models of a pair; on many `ranks`, a shard of the target.

    `expose` names values inside draft.onnx that the drafter can return besides its hidden states.

    Raises MissingDependencyError when nothing here computes on the options' device, RequestError for a draft length or
    a number of requests that this pair cannot have, EngineError and CheckpointError for what only shows as the models
    are loaded.
    """
    manifest, checkpoint, dtype = pair.manifest, pair.target, options.dtype
    parse_draft_length(options.draft_length, manifest.draft.num_draft_tokens)
    target_dtype(dtype, checkpoint.directory, checkpoint.weights)  # what is wrong is said before the drafter loads
    device = choose_device(options.device)
    sharded: dict[str, object] = {}
    if ranks is not None and ranks.size > 1:
        ranks.verify_same_facts({**rank_facts(pair.engine, checkpoint), "dtype": dtype})
        sharded["distributed_config"] = sharding(checkpoint.directory, ranks.size)
        device = this_rank(device)
    num_slots = options.max_batch_size or default_batch_size(manifest)
    with room_for(num_slots):
        drafter = open_drafter(pair.engine, manifest, num_slots=num_slots, device=device, expose=expose)

    taps = manifest.draft.target_layer_ids
    num_ranks = ranks.size if ranks else 1
    model = load_model(checkpoint.directory, checkpoint.spec, taps, dtype=dtype, num_ranks=num_ranks, **sharded)
    if not sharded:  # transformers puts shards where they belong
        model = model.to(device)
    target = make_target(model, taps, num_slots, accelerate)
    if model.dtype == torch.bfloat16 and not target.is_batch_invariant:
        LOG.warning(
            "%s in bfloat16: here a block rounds otherwise than one token a pass, so near-ties may fall another way"
            " than in plain decoding; --dtype float32 avoids that",
            checkpoint.directory,
        )
    return Session(
        manifest,
        target,
        drafter,
        pair.tokenizer,
        stop_token_ids(model),
        num_slots=num_slots,
        cache_gib=options.cache_gib,
        ranks=ranks,
    )


@contextmanager
def room_for(num_slots: int) -> Iterator[None]:
    """RequestError where torch finds no memory for caches of so many requests."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        raise RequestError(
            f"max_batch_size: expected memory for the caches of {num_slots} requests, found too little"
            f" ({cut(str(error).partition(NEW_LINE)[0])})",
            hint="lower max_batch_size",
        ) from None


def this_rank(device: str) -> str:
    """The rank's own GPU, which `join` has made torch's current one."""
    return f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device


def choose_device(device: str) -> str:
    """What `device` comes to, "cpu" or "cuda"; MissingDependencyError for a CUDA device that torch does not see."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise MissingDependencyError(
            f"device: expected a CUDA device, found none that torch {torch.__version__} sees",
            hint="install a CUDA build of torch, or decode with --device cpu",
        )
    return "cuda" if has_cuda and device != "cpu" else "cpu"
