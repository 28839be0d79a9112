# SPDX-License-Identifier: Apache-2.0
"""Opens an engine and its target: chooses what runs both here, of which the decode loop knows only the interfaces."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions, choose_device
from dflash_trt.deploy.deployment_file import refuse_deployment
from dflash_trt.errors import RequestError, cut
from dflash_trt.runtime.checked_pair import CheckedPair, default_batch_size
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.draft_length import parse_draft_length
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.embedded_backend import EmbeddedBackend
from dflash_trt.runtime.progress_display import progress_line
from dflash_trt.runtime.ranks.roles import Follower, Leader
from dflash_trt.runtime.ranks.sharding import rank_facts, sharding
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.huggingface import load_model, make_target, stop_token_ids
from dflash_trt.runtime.targets.runnable import target_dtype

LOG = logging.getLogger("dflash_trt.runtime")


def open_engine(engine: str | Path, target: str | None, options: RuntimeOptions = DEFAULTS) -> EmbeddedBackend:
    """Opens an engine directory; raises what `open_embedded` raises, EngineError for a deployment."""
    refuse_deployment(engine)
    return open_embedded(CheckedPair.read(Path(engine), target), options)


def open_embedded(pair: CheckedPair, options: RuntimeOptions = DEFAULTS) -> EmbeddedBackend:
    """Loads a checked pair; raises what `load_session` raises, RequestError for ranks, which `generate --tp` joins."""
    if options.num_ranks != 1:
        hint = "dflash-trt generate --tp N joins ranks"
        raise RequestError(f"num_ranks: expected 1, found {options.num_ranks}", hint=hint)
    with progress_line(f"loading {pair.target_name}"):
        return EmbeddedBackend(load_session(pair, options), options)


def open_session(engine: Path, target_name: str, options: RuntimeOptions = DEFAULTS) -> Session:
    """Reads and loads both models; raises what `CheckedPair.read` and `load_session` raise."""
    return load_session(CheckedPair.read(engine, target_name), options)


def load_session(
    pair: CheckedPair, options: RuntimeOptions = DEFAULTS, *, expose: Sequence[str] = (),
    ranks: Leader | Follower | None = None,
) -> Session:  # fmt: skip
    """Loads both models of a pair; on many `ranks`, a shard of the target.

    `expose` names values inside draft.onnx that the drafter can return besides its hidden states.

    Raises MissingDependencyError when nothing here computes on the options' device, RequestError for a draft length or
    a number of requests that this pair cannot have, EngineError and CheckpointError for what only loading shows.
    """
    manifest, checkpoint, dtype = pair.manifest, pair.target, options.dtype
    parse_draft_length(options.draft_length, manifest.draft.num_draft_tokens)
    target_dtype(dtype, checkpoint.directory, checkpoint.weights)  # errors come before the drafter loads
    device, num_ranks = choose_device(options.device), ranks.size if ranks else 1
    sharded: dict[str, object] = {}
    if ranks is not None and num_ranks > 1:
        ranks.verify_same_facts({**rank_facts(pair.engine, checkpoint), "dtype": dtype})
        sharded["distributed_config"] = sharding(checkpoint.directory, num_ranks)
        if device == "cuda":
            device = f"cuda:{torch.cuda.current_device()}"  # which `join` has set
    max_batch_size = options.max_batch_size or default_batch_size(manifest)
    with room_for(max_batch_size):
        drafter = open_drafter(
            pair.engine, manifest, num_slots=max_batch_size, device=device, executor=options.executor, expose=expose
        )
    taps = manifest.draft.target_layer_ids
    model = load_model(
        checkpoint.directory, checkpoint.spec, taps, dtype=dtype, num_ranks=num_ranks,
        device="cpu" if sharded else device, **sharded,  # transformers puts shards where they belong
    )  # fmt: skip
    target = make_target(model, taps, max_batch_size, accelerate, tap_hidden_size=manifest.draft.tap_hidden_size)
    if model.dtype == torch.bfloat16 and not target.is_batch_invariant:
        LOG.warning(
            "%s in bfloat16: here a block rounds otherwise than one token a pass, so near-ties may fall another way"
            " than in plain decoding; --dtype float32 avoids that",
            checkpoint.directory,
        )
    return Session(
        manifest, target, drafter, pair.tokenizer, stop_token_ids(model),
        max_batch_size=max_batch_size, cache_gib=options.cache_gib, ranks=ranks,
    )  # fmt: skip


@contextmanager
def room_for(max_batch_size: int) -> Iterator[None]:
    """Raises RequestError where torch finds no memory for the caches of this many requests."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        reason, _, _ = str(error).partition("\n")
        raise RequestError(
            f"max_batch_size: expected memory for the caches of {max_batch_size} requests, found too little"
            f" ({cut(reason)})",
            hint="lower max_batch_size",
        ) from None
