# SPDX-License-Identifier: Apache-2.0
"""Rules for TensorRT-LLM's arguments: parallelism, CUDA graphs, required keys and draft lengths."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import (
    CheckedConfig,
    Rule,
    check_num_draft_tokens,
    check_ranks,
    check_token_budget,
    error,
    unchecked,
    warning,
)
from dflash_trt.deploy.rules.engine_rules import engine_rules
from dflash_trt.deploy.rules.memory_rules import check_memory
from dflash_trt.deploy.rules.target_rules import longest_context, target_family
from dflash_trt.deploy.rules.trtllm_cache_rules import SPEC, disk_cache, draft_attention, fp8_context, prefix_reuse
from dflash_trt.deploy.rules.trtllm_draft_rules import (
    backbone,
    context_projection,
    draft_place,
    mixed_precision,
    same_facts,
    taps,
)

WINDOW, THRESHOLD = f"{SPEC}.acceptance_rate_window_size", f"{SPEC}.acceptance_rate_threshold"
MODELING_V2 = "TRTLLM_MODELING_V2"
"""Variable of the environment; off unless set."""


def parallelism(config: CheckedConfig) -> Iterator[Finding]:
    """Ranks and GPUs."""
    yield from check_ranks(config, "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
    tensor = config.number("tensor_parallel_size") or 1
    expert, shared = config.number("moe_expert_parallel_size"), config.number("moe_tensor_parallel_size")
    if expert is not None and tensor % expert:
        yield error(
            "parallelism", "moe_expert_parallel_size", f"a divisor of tensor_parallel_size {tensor}", expert,
            "set it to 1" + (f" or {tensor}" if tensor > 1 else ""),
        )  # fmt: skip
    elif expert is not None and shared is not None and expert * shared != tensor:
        yield error(
            "parallelism", "moe_tensor_parallel_size",
            f"{tensor // expert} (tensor_parallel_size {tensor} / moe_expert_parallel_size {expert})", shared,
            f"set it to {tensor // expert}, or leave it out",
        )  # fmt: skip


def cuda_graphs(config: CheckedConfig) -> Iterator[Finding]:
    """Graphs for batches that never occur, or for too few."""
    graphs, batch = config.number("cuda_graph_config.max_batch_size"), config.number("max_batch_size")
    listed = config.setting("cuda_graph_config.batch_sizes")
    sizes = [size for size in listed if isinstance(size, int)] if isinstance(listed, list) else []
    if sizes and graphs and max(sizes) != graphs:
        yield error(
            "cuda-graphs", "cuda_graph_config.max_batch_size", f"{max(sizes)}, the largest of batch_sizes", graphs,
            "leave cuda_graph_config.batch_sizes out" if graphs > max(sizes) else f"set it to {max(sizes)}",
        )  # fmt: skip
    elif graphs and batch and graphs > batch:
        yield warning(
            "cuda-graphs", "cuda_graph_config.max_batch_size", f"at most max_batch_size {batch}", graphs,
            f"set it to {batch}",
        )  # fmt: skip


def required(config: CheckedConfig) -> Iterator[Finding]:
    """Keys that DFlash needs."""
    for key in ("speculative_model", "max_draft_len"):
        if config.setting(f"{SPEC}.{key}") is None:
            what = "the draft checkpoint" if key == "speculative_model" else "K, the drafted tokens of a step"
            yield error("missing-key", f"{SPEC}.{key}", what, "no such key", f"add {key}")
    if config.setting("max_seq_len") is None:
        longest = longest_context(config)
        yield error(
            "max-seq-len", "max_seq_len", "the length that sizes the context arena", "no such key",
            "add max_seq_len: without it the arena takes the draft's max_position_embeddings",
            **({} if longest is None else {"max_seq_len": longest}),
        )  # fmt: skip


def ngram_length(config: CheckedConfig) -> Iterator[Finding]:
    """K, which NGramDecodingConfig refuses to be without."""
    if config.method == "ngram" and config.number(key := f"{SPEC}.max_draft_len") is None:
        yield error("missing-key", key, "K, the drafted tokens of a step", config.setting(key), f"set {key}")


def draft_schedule(config: CheckedConfig) -> Iterator[Finding]:
    """Drafts by largest batch: K at first, never more; the class refuses it beside max_concurrency."""
    key = f"{SPEC}.draft_len_schedule"
    schedule = config.document[SPEC].get("draft_len_schedule")
    if not isinstance(schedule, dict) or not schedule:
        return
    most, batch = config.number(f"{SPEC}.max_draft_len"), config.number("max_batch_size")
    entries = [(at, length) for at, length in schedule.items() if isinstance(at, int) and isinstance(length, int)]
    if len(entries) < len(schedule) or min(min(entry) for entry in entries) < 0:
        yield error(
            "draft-schedule", key, "batch sizes and draft lengths, none negative", schedule, "write whole numbers"
        )
        return
    entries.sort()
    if most is not None and (entries[0][1] != most or max(length for _, length in entries) > most):
        yield error(
            "draft-schedule", key, f"max_draft_len {most} at first and never more", schedule,
            f"write {{{entries[0][0]}: {most}, ...}}",
        )  # fmt: skip
    plain = next((at for at, length in entries if not length), None)
    if plain is not None or (batch is not None and entries[-1][0] < batch):
        found = f"0 up to batch {plain}" if plain is not None else f"none beyond batch {entries[-1][0]}"
        yield error(
            "draft-schedule", key, f"1 or more up to max_batch_size {batch}: a step without drafts stores no context,"
            " and its requests draft from a truncated one as long as they live (dflash.py @ 8d62b3e5, _forward_impl)",
            found, "write 1",
        )  # fmt: skip
    if config.number(f"{SPEC}.max_concurrency") is not None:
        yield error("draft-schedule", key, "it or max_concurrency", "both", "remove max_concurrency")


def switches(config: CheckedConfig) -> Iterator[Finding]:
    """TensorRT-LLM's limits of requests and of acceptance, below or above which it does not draft."""
    limit, batch = config.number(f"{SPEC}.max_concurrency"), config.number("max_batch_size")
    if limit is not None and (batch is None or limit < batch):
        problem = (
            f"what requests accept after a step of more than {limit} requests, and whether it stores their context"
        )
        fix = "write draft_len_schedule with 1 or more, or test it first"
        yield unchecked("max-concurrency", f"{SPEC}.max_concurrency", problem, fix)
    given = [key for key in (WINDOW, THRESHOLD) if config.setting(key) is not None]
    if len(given) == 1:
        missing = (THRESHOLD if given == [WINDOW] else WINDOW).rpartition(".")[2]
        yield warning(
            "acceptance-threshold", given[0], f"{missing}, too: py_executor.py reads both or neither",
            "it alone", f"add {missing}",
        )  # fmt: skip
    elif given and config.setting("enable_attention_dp") is True:
        yield unchecked(
            "acceptance-threshold", WINDOW, "whether ranks with attention data parallelism turn drafting off together",
            "remove both keys, or test it first",
        )  # fmt: skip


def removed(config: CheckedConfig) -> Iterator[Finding]:
    """Arguments that the release silently drops."""
    for key, successor in config.schema.removed().items():
        if config.is_set(key):
            yield warning("removed-key", key, successor, "a key that the release drops", "remove it")


def modeling_v2(config: CheckedConfig) -> Iterator[Finding]:
    """Modelling code of single targets, which captures no taps for a drafter that it does not know."""
    overrides = config.setting("env_overrides")
    variables = config.environment | (overrides if isinstance(overrides, dict) else {})
    found = str(variables.get(MODELING_V2) or "off").strip().lower()
    if found != "off":
        is_override = isinstance(overrides, dict) and MODELING_V2 in overrides
        key, fix = (f"env_overrides.{MODELING_V2}", "remove it") if is_override else (MODELING_V2, "leave it unset")
        yield warning(
            "modeling-v2", key,
            "off: with it gpt-oss-120b on one GPU of SM 10.3 captures no taps and builds no drafter, so that nothing is"
            " drafted (_torch/_experimental/modeling_v2/models/gpt_oss at 9cdbae60)", found, fix,
        )  # fmt: skip


RULES: tuple[Rule, ...] = (
    parallelism,
    cuda_graphs,
    ngram_length,
    lambda config: check_token_budget(config, bool(config.document.get(SPEC))),
    disk_cache,
    removed,
)
DFLASH_RULES: tuple[Rule, ...] = (
    required,
    lambda config: check_num_draft_tokens(config, config.number(f"{SPEC}.max_draft_len")),
    draft_schedule,
    switches,
    draft_attention,
    prefix_reuse,
    context_projection,
    mixed_precision,
    fp8_context,
    backbone,
    engine_rules,
    same_facts,
    taps,
    draft_place,
    target_family,
    modeling_v2,
    check_memory,
)
"""Rules for configurations that decode with DFlash."""
