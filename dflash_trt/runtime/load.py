# SPDX-License-Identifier: Apache-2.0
"""Opens an engine and its target: chooses what runs both here, of which the decode loop knows only the interfaces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import clear_frames
from typing import Any

import torch
from transformers import PreTrainedModel

from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions, choose_device
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.deploy.deployment_file import refuse_deployment
from dflash_trt.errors import CheckpointError, RequestError, first_line
from dflash_trt.runtime import sampling
from dflash_trt.runtime.checked_pair import CheckedPair, default_batch_size
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.embedded_backend import EmbeddedBackend
from dflash_trt.runtime.plugin_processors import acceptance_rule
from dflash_trt.runtime.policy.parse_draft_length import parse_draft_length
from dflash_trt.runtime.progress_display import progress_line
from dflash_trt.runtime.ranks.roles import ALONE, Follower, Leader
from dflash_trt.runtime.ranks.sharded_target import ShardedTarget, follow
from dflash_trt.runtime.ranks.sharding import sharding, target_facts
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.huggingface import load_model, make_target, stop_token_ids
from dflash_trt.runtime.targets.runnable import target_dtype
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.sequential_target import BorrowedTarget

LOG = logging.getLogger("dflash_trt.runtime")
NO_MEMORY = ("allocate memory", "out of memory")
"""Parts of torch's and ONNX Runtime's messages; an illegal memory access of a GPU is another error."""


def open_engine(
    engine: str | Path, target: str | None, options: RuntimeOptions = DEFAULTS, ranks: Leader | Follower = ALONE
) -> EmbeddedBackend:
    """Opens an engine directory; raises what `open_embedded` raises, EngineError for a deployment."""
    refuse_deployment(engine)
    return open_embedded(CheckedPair.read(Path(engine), target), options, ranks)


def open_embedded(
    pair: CheckedPair, options: RuntimeOptions = DEFAULTS, ranks: Leader | Follower = ALONE
) -> EmbeddedBackend:
    """Loads a checked pair; raises what `load_session` raises."""
    with progress_line(f"loading {pair.target_name}"):
        session = load_session(pair, options, ranks=ranks)
        return EmbeddedBackend(session, options, on_end=session.close)


def open_session(engine: Path, target_name: str, options: RuntimeOptions = DEFAULTS) -> Session:
    """Reads and loads both models; raises what `CheckedPair.read` and `load_session` raise."""
    return load_session(CheckedPair.read(engine, target_name), options)


def load_session(
    pair: CheckedPair, options: RuntimeOptions = DEFAULTS, *, expose: Sequence[str] = (),
    ranks: Leader | Follower = ALONE,
) -> Session:  # fmt: skip
    """Loads both models of a pair; on many `ranks`, the drafter on rank 0 and the target as `prepare_target` does.

    `expose` names values inside draft.onnx that the drafter can return besides its hidden states.

    Raises MissingDependencyError when nothing here computes on the options' device, RequestError for a draft length,
    caches or requests that this pair cannot have, EngineError and CheckpointError for what only loading shows.
    """
    manifest, device = pair.manifest, choose_device(options.device)
    parse_draft_length(options.draft_length, manifest.draft.num_draft_tokens)
    rule = acceptance_rule(options.acceptance_rule)
    max_batch_size = options.max_batch_size or default_batch_size(manifest)
    load_target = prepare_target(
        pair.target, manifest.draft.target_layer_ids, max_batch_size, ranks,
        dtype=options.dtype, device=device, tap_hidden_size=manifest.draft.tap_hidden_size,
    )  # fmt: skip
    with room_for(max_batch_size):
        drafter = open_drafter(
            pair.engine, manifest, num_slots=max_batch_size, device=device, executor=options.executor, expose=expose
        )
    try:
        target = load_target()
    except BaseException:
        drafter.close()
        raise
    if target.model.dtype == torch.bfloat16 and not target.is_batch_invariant:
        LOG.warning(
            "lossless by the same kernels: in bfloat16 a block of %s rounds differently from one token a pass here, so"
            " near-ties may differ from plain decoding; --dtype float32 avoids that",
            pair.target_name,
        )
    session = Session(
        manifest, target, drafter, pair.tokenizer, stop_token_ids(target.model),
        max_batch_size=max_batch_size, cache_gib=options.cache_gib, acceptance_rule=rule,
    )  # fmt: skip
    if rule is not None:
        LOG.warning("acceptance rule %s: the output depends on the drafts; it is lossy", options.acceptance_rule)
    try:
        session.allocate()
        if device != "cpu":
            sampling.warm_up(device, manifest.target.vocab_size)
    except torch.OutOfMemoryError:
        free = torch.cuda.mem_get_info(device)[0] / 2**30
        session.close()
        raise RequestError(
            f"{options.cache_gib:g} GiB of caches do not fit: {free:.1f} GiB are free after loading both models",
            hint="lower --cache-gib",
        ) from None
    return session


def session_around(pair: CheckedPair, model: PreTrainedModel, options: RuntimeOptions = DEFAULTS) -> Session:
    """A session whose target is a loaded model: it computes as it is, where it is, and stays loaded after `close`.

    Requests run one after the other. Raises CheckpointError where the model is not the target of `pair`, or cannot take
    tokens back, and EngineError as `open_drafter` does.
    """
    manifest, config = pair.manifest, model.config.get_text_config()
    if (found := model.config.model_type).removesuffix("_text") != (expected := manifest.target.model_type):
        raise CheckpointError(f"target: expected a {expected} model ({pair.target.directory}), found a {found} model")
    for fact in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if (found := getattr(config, fact, None)) != (expected := getattr(manifest.target, fact)):
            raise CheckpointError(f"target: {fact}: expected {expected} ({pair.target.directory}), found {found}")
    drafter = open_drafter(pair.engine, manifest, device=str(model.device), executor=options.executor)
    target = BorrowedTarget(
        model, manifest.draft.target_layer_ids, num_slots=1, tap_hidden_size=manifest.draft.tap_hidden_size
    )
    return Session(manifest, target, drafter, pair.tokenizer, stop_token_ids(model), cache_gib=options.cache_gib)


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
    target_dtype(dtype, checkpoint.directory, checkpoint.weights, device)
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
                f"{checkpoint.directory} does not fit into the GPU's memory ({first_line(error)})",
                hint="--dtype bfloat16 halves what float32 takes; else take a larger GPU, or more of them (--tp)",
            ) from None

    if isinstance(ranks, Follower):
        follow(ranks, load())
    return load if ranks.size == 1 else lambda: ShardedTarget(load(), ranks)


@contextmanager
def room_for(max_batch_size: int) -> Iterator[None]:
    """Raises RequestError where torch finds no memory for the caches of this many requests."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        raise RequestError(
            f"the caches of {max_batch_size} requests do not fit into memory ({first_line(error)})",
            hint="lower max_batch_size",
        ) from None
