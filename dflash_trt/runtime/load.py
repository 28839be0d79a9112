# SPDX-License-Identifier: Apache-2.0
"""Opens an engine and its target: chooses what runs both here, of which the decode loop knows only the interfaces."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions, choose_device
from dflash_trt.deploy.deployment_path import refuse_deployment
from dflash_trt.errors import RequestError, first_line
from dflash_trt.runtime import sampling
from dflash_trt.runtime.checked_pair import CheckedPair, default_batch_size
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.embedded_backend import EmbeddedBackend
from dflash_trt.runtime.open_target import prepare_target
from dflash_trt.runtime.policy.parse_draft_length import parse_draft_length
from dflash_trt.runtime.progress_display import progress_line
from dflash_trt.runtime.ranks.roles import ALONE, Follower, Leader
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.huggingface import stop_token_ids

LOG = logging.getLogger("dflash_trt.runtime")


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
    max_batch_size = options.max_batch_size or default_batch_size(manifest)
    open_target = prepare_target(
        pair.target, manifest.draft.target_layer_ids, max_batch_size, ranks,
        dtype=options.dtype, device=device, tap_hidden_size=manifest.draft.tap_hidden_size,
    )  # fmt: skip
    with room_for(max_batch_size):
        drafter = open_drafter(
            pair.engine, manifest, num_slots=max_batch_size, device=device, executor=options.executor, expose=expose
        )
    try:
        target = open_target()
    except BaseException:
        drafter.close()
        raise
    if target.model.dtype == torch.bfloat16 and not target.is_batch_invariant:
        LOG.warning(
            "%s in bfloat16: here a block rounds otherwise than one token a pass, so near-ties may fall another way"
            " than in plain decoding; --dtype float32 avoids that",
            pair.target.directory,
        )
    session = Session(
        manifest, target, drafter, pair.tokenizer, stop_token_ids(target.model),
        max_batch_size=max_batch_size, cache_gib=options.cache_gib,
    )  # fmt: skip
    try:
        session.allocate()
        if device != "cpu":
            sampling.warm_up(device, manifest.target.vocab_size)
    except torch.OutOfMemoryError:
        free = torch.cuda.mem_get_info(device)[0] / 2**30
        session.close()
        raise RequestError(
            f"cache_gib: expected memory for {options.cache_gib:g} GiB of caches, found {free:.1f} GiB free beside both"
            " models",
            hint="lower --cache-gib",
        ) from None
    return session


NO_MEMORY = ("allocate memory", "out of memory")
"""Parts of torch's and ONNX Runtime's messages; an illegal memory access of a GPU is another error."""


@contextmanager
def room_for(max_batch_size: int) -> Iterator[None]:
    """Raises RequestError where torch finds no memory for the caches of this many requests."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        raise RequestError(
            f"max_batch_size: expected memory for the caches of {max_batch_size} requests, found too little"
            f" ({first_line(error)})",
            hint="lower max_batch_size",
        ) from None
