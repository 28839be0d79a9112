# SPDX-License-Identifier: Apache-2.0
"""Rules for vLLM's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.hybrid_caches import hybrid_caches, vllm_cache_layout
from dflash_trt.deploy.rules.attention_rules import vllm_attention
from dflash_trt.deploy.rules.checked_config import (
    CheckedConfig,
    Rule,
    check_num_draft_tokens,
    check_ranks,
    check_required,
    check_token_budget,
    error,
    quantized_context,
    unchecked,
    warning,
)
from dflash_trt.deploy.rules.memory_rules import check_memory, pool_share
from dflash_trt.deploy.rules.quantized_rules import unread
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import json_document

SPEC = "speculative_config"
SCHEDULE = f"{SPEC}.num_speculative_tokens_per_batch_size"


def renamed(config: CheckedConfig) -> Iterator[Finding]:
    """Old keys, which vLLM refuses."""
    for key, name in config.schema.rules["renamed"]["keys"].items():
        if config.is_set(f"{SPEC}.{key}"):
            yield error("renamed-key", f"{SPEC}.{key}", f"{name} in its place", "this key", f"write {name}")


def ngram_lengths(config: CheckedConfig) -> Iterator[Finding]:
    """Shortest and longest n-gram that is looked up."""
    least, most = config.number(f"{SPEC}.prompt_lookup_min"), config.number(f"{SPEC}.prompt_lookup_max")
    if config.method == "ngram" and least is not None and most is not None and least > most:
        yield error("ngram-lengths", f"{SPEC}.prompt_lookup_min", f"at most prompt_lookup_max {most}", least,
                    f"set it to {most}")  # fmt: skip


def draft_parallel(config: CheckedConfig) -> Iterator[Finding]:
    """The drafter runs on one rank or on all."""
    draft = config.number(f"{SPEC}.draft_tensor_parallel_size") if config.method else None
    tensor = config.number("tensor_parallel_size") or 1
    if draft is not None and draft not in (1, tensor):
        key = f"{SPEC}.draft_tensor_parallel_size"
        yield error("parallelism", key, f"1 or tensor_parallel_size {tensor}", draft, f"set it to {tensor}")


def context_projection(config: CheckedConfig) -> Iterator[Finding]:
    """A quantised q, k or v loads, and costs vLLM its fused context projection."""
    names, quantized = quantized_context(config)
    if quantized and unread("vllm", set(config.served.algorithms.values())) is None:
        yield warning(
            "quantized-context", f"{SPEC}.model",
            f"unquantised {', '.join(names)}: vLLM projects the context of all layers at once only then", quantized,
            "compare with --recipe nvfp4-native; with these each layer projects its own context",
        )  # fmt: skip


def cache_groups(config: CheckedConfig) -> Iterator[Finding]:
    """Targets of which each layer is a KV cache group, whatever the layout."""
    found = hybrid_caches().get(config.served.checkpoint or "")
    if (
        found is not None
        and vllm_cache_layout(config.served.checkpoint, config.number("tensor_parallel_size") or 1) is None
    ):
        yield unchecked(
            "cache-groups", f"{SPEC}.model",
            f"vLLM 0.33.0 makes each of {found.layers} layers a KV cache group, whose metadata every step builds"
            " (vllm#49730, vllm#51742, open): pages of one size, so that no layout brings fewer",
            "compare its speed with SGLang's",
        )  # fmt: skip


def token_budget(config: CheckedConfig) -> Iterator[Finding]:
    """Tokens of a pass: vLLM 0.33 refuses only a budget below one draft's rows, or below one token per request."""
    K, batch = config.number(f"{SPEC}.num_speculative_tokens"), config.number("max_num_seqs")
    yield from check_token_budget(
        config, config.method is not None, refused_below=max((K or 0) + 2, batch or 0),
        otherwise=config.schema.rules["token_budget"]["otherwise"],
    )  # fmt: skip


def rope_overrides(config: CheckedConfig) -> Iterator[Finding]:
    """A RoPE that --hf-overrides stretches: a mapping changes the target alone (compose_draft_hf_overrides)."""
    overrides = config.setting("hf_overrides")
    if isinstance(overrides, str):
        with suppress(ConfigError):
            overrides = json_document(overrides.encode(), "hf_overrides", ConfigError)
    named = map(str, overrides) if isinstance(overrides, dict) else ()
    if keys := [key for key in named if key.startswith(("rope", "max_position"))]:
        yield unchecked(
            "rope-overrides", "hf_overrides", f"{', '.join(keys)} of the target alone: the draft keeps its own"
            " positions, and what it accepts beyond them is not known", "compare its acceptance length on long prompts",
        )  # fmt: skip


def other_topologies(config: CheckedConfig) -> Iterator[Finding]:
    """Prefill and decode in different servers, and pipeline stages."""
    if config.setting("kv_transfer_config"):
        yield unchecked(
            "disaggregated", "kv_transfer_config", "prefill and decode in different servers: vLLM 0.33 keeps the"
            " draft's layers as KV cache groups of their own; whether its context arrives was not looked up",
            "compare its acceptance length with that of one server",
        )  # fmt: skip
    if (config.number("pipeline_parallel_size") or 1) > 1:
        yield unchecked(
            "pipeline", "pipeline_parallel_size", "a draft with pipeline stages: vLLM 0.33 loads it on one of them;"
            " whether the others bring it hidden states was not looked up", "set it to 1, or test it first",
        )  # fmt: skip


def draft_schedule(config: CheckedConfig) -> Iterator[Finding]:
    """Drafts by ranges of batch sizes, as vLLM 0.33 validates them (v1/spec_decode/dynamic/utils.py)."""
    found, most = config.setting(SCHEDULE), config.number(f"{SPEC}.num_speculative_tokens")
    if found is None:
        return
    expected = "lists of three integers: first batch, last batch, drafts"
    if not isinstance(found, list) or not found or not all(map(_is_entry, found)):
        yield error("draft-schedule", SCHEDULE, expected, found, "write [[1, 8, 7], [9, 64, 3]], for example")
        return
    ranges = sorted(found, key=lambda entry: entry[0])
    ends = [0, *(last for _, last, _ in ranges)]
    if any(first > last or drafts < 0 for first, last, drafts in ranges):
        yield error(
            "draft-schedule", SCHEDULE, "ranges that begin before they end, and 0 drafts or more", found, "correct them"
        )
    elif ranges[0][0] != 1:
        yield error("draft-schedule", SCHEDULE, "a first range from batch 1", found, "begin with 1")
    elif any(first <= end for (first, _, _), end in zip(ranges, ends, strict=False)):
        yield error("draft-schedule", SCHEDULE, "ranges that do not overlap", found, "correct them")
    elif most is not None and (larger := max(drafts for _, _, drafts in ranges)) > most:
        yield warning(
            "draft-schedule", SCHEDULE, f"at most num_speculative_tokens {most}",
            f"{larger}, which vLLM cuts to {most}", f"write {most}, or raise num_speculative_tokens",
        )  # fmt: skip


def _is_entry(entry: object) -> bool:
    values = entry if isinstance(entry, list) else []
    return len(values) == 3 and all(isinstance(each, int) and not isinstance(each, bool) for each in values)


RULES: tuple[Rule, ...] = (
    lambda config: check_required(config, config.method or "", f"{SPEC}."),
    renamed,
    ngram_lengths,
    draft_parallel,
    lambda config: check_ranks(config, "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    token_budget,
    vllm_attention,
    draft_schedule,
    pool_share,
)
DFLASH_RULES: tuple[Rule, ...] = (
    lambda config: check_num_draft_tokens(config, config.number(f"{SPEC}.num_speculative_tokens")),
    context_projection,
    cache_groups,
    rope_overrides,
    other_topologies,
    check_memory,
)
"""Rules for configurations that decode with DFlash."""
