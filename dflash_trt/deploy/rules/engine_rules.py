# SPDX-License-Identifier: Apache-2.0
"""Rules of engine mode, in which TensorRT-LLM calls our plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.deploy.finding import ERROR, Finding
from dflash_trt.deploy.rules.checked_config import CheckedConfig, error, unchecked
from dflash_trt.engine.manifest import read_num_ranks
from dflash_trt.engine.plans.build_checks import check_limits
from dflash_trt.engine.plans.machine import check_precision
from dflash_trt.errors import BuildError
from dflash_trt.files.read import is_directory

MODEL = "speculative_config.speculative_model"


def engine_rules(config: CheckedConfig) -> Iterator[Finding]:
    """All of them, for a configuration in engine mode."""
    if config.served.mode == "engine":
        yield from _release(config)
        yield from _ranks(config)
        yield from _precision(config)
        yield from _limits(config)


def _release(config: CheckedConfig) -> Iterator[Finding]:
    """Engine mode stands in for the drafter of known releases: its interface is internal to TensorRT-LLM."""
    schema = config.schema
    if "engine_mode" not in schema.rules:
        yield error(
            "engine-mode", MODEL, "a release whose drafter interface is known to engine mode",
            f"tensorrt_llm {schema.release}", "serve the draft checkpoint in native mode",
        )  # fmt: skip
    elif schema.stands_for:
        yield unchecked(
            "engine-mode", MODEL, f"whether the drafter's interface of {schema.release} is that of {schema.version}",
            "make contract TENSORRT_LLM=DIR compares a checkout; the start of the server does, too",
        )  # fmt: skip


def _ranks(config: CheckedConfig) -> Iterator[Finding]:
    """An engine is whole on every rank, or shared by all ranks; a local one must match the deployment."""
    ranks, found = config.number("tensor_parallel_size") or 1, config.served.num_ranks
    if found > 1 and config.setting("enable_attention_dp") is True:
        yield error(
            "engine-ranks", MODEL, "a whole drafter beside enable_attention_dp, whose ranks have requests of their own",
            f"one shared by {found}", "build it without --tp",
        )  # fmt: skip
    elif found not in (1, ranks):
        yield error(
            "engine-ranks", MODEL, f"a drafter shared by {ranks} ranks (tensor_parallel_size), or a whole one",
            f"one shared by {found}", f"build it with --tp {ranks}",
        )  # fmt: skip
    engine = config.setting(MODEL)
    built = read_num_ranks(Path(engine)) if isinstance(engine, str) and is_directory(engine) else None
    if built not in (None, found):
        yield error(
            "engine-ranks", MODEL, f"an engine for num_ranks {found}", f"{engine}, for {built}",
            "build it again with --force, or change num_ranks",
        )  # fmt: skip


def _precision(config: CheckedConfig) -> Iterator[Finding]:
    """The GPU must support the plans' precision."""
    if config.served.gpus is None:
        return
    try:
        check_precision(set(config.served.algorithms.values()), [config.served.gpus.gpu.compute_capability])
    except BuildError as refused:
        yield Finding("precision", ERROR, MODEL, refused.message, refused.hint or "")


def _limits(config: CheckedConfig) -> Iterator[Finding]:
    """Our attention plugin takes batches, contexts and heads of some sizes only."""
    if config.served.draft_sizes is None:
        return
    try:
        check_limits(
            config.served.draft_sizes.spec, config.number("max_batch_size") or 1, config.number("max_seq_len") or 1
        )
    except BuildError as refused:
        yield Finding("plugin-limits", ERROR, MODEL, refused.message, refused.hint or "")
