# SPDX-License-Identifier: Apache-2.0
"""Rules for TensorRT-LLM's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.checkpoint.source import REPOSITORY_ID
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import (
    CheckedConfig,
    Rule,
    check_num_draft_tokens,
    check_ranks,
    check_token_budget,
    error,
    quantized_context,
    unchecked,
    warning,
)
from dflash_trt.deploy.rules.engine_rules import engine_rules
from dflash_trt.deploy.rules.memory_rules import check_memory
from dflash_trt.deploy.rules.target_rules import longest_context, target_family
from dflash_trt.deploy.sizes import CHECKPOINT
from dflash_trt.deploy.trtllm_arguments import converted_draft
from dflash_trt.files.read import is_directory

SPEC = "speculative_config"
BACKEND = f"{SPEC}.attention_backend"
PADDING = "cuda_graph_config.enable_padding"
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


def draft_attention(config: CheckedConfig) -> Iterator[Finding]:
    """Kernels that the GPU has."""
    backend = config.setting(BACKEND)
    if config.served.mode == "engine":
        if backend not in ("TRTLLM", "VANILLA"):
            yield error(
                "draft-attention", BACKEND, "TRTLLM (our plans read the managed pool) or VANILLA (a dense arena)",
                backend, "set it to TRTLLM",
            )  # fmt: skip
        elif backend == "TRTLLM" and config.setting(PADDING) is True:
            yield warning(
                "graph-padding", PADDING,
                "false: past their slot's pages, rows that pad a batch write into page 0 of the pool, which is another"
                " request's (dflash.py @ 414ba69f, 8d62b3e5)",
                True, f"set {PADDING} to false",
            )  # fmt: skip
        return
    has_selector = (
        config.served.draft_sizes is not None and config.served.draft_sizes.spec.candidate_selector is not None
    )
    if has_selector and backend == "TRTLLM":  # TensorRT-LLM, modeling_dflash.py, pull request 18155
        yield error(
            "draft-attention", BACKEND, "VANILLA or FA4 (a DFlash2 draft sees a finite window in both directions)",
            backend, "set it to VANILLA",
        )  # fmt: skip
        return
    kernels = config.schema.rules["draft_attention"]["kernels"]
    needed = kernels.get(backend) if isinstance(backend, str) else None
    if needed is None:
        return
    if config.served.gpus is None:
        yield unchecked("draft-attention", BACKEND, f"whether the GPU has {backend} kernels", "give --gpus")
        return
    gpu = config.served.gpus.gpu
    if list(gpu.compute_capability) not in needed:
        names = " or ".join(f"SM {major}.{minor}" for major, minor in needed)
        yield error(
            "draft-attention", BACKEND, f"{names} for {backend}", f"{config.served.gpus.name} ({gpu.sm})",
            "set it to VANILLA",
        )  # fmt: skip


def prefix_reuse(config: CheckedConfig) -> Iterator[Finding]:
    """Reused prompt blocks never pass the target again, so that the drafter has no context rows for them."""
    reuse = config.setting("kv_cache_config.enable_block_reuse")
    if reuse is not True:
        return
    said = "true" if config.is_set("kv_cache_config.enable_block_reuse") else "true (its default)"
    rule = config.schema.rules["prefix_reuse"]
    key = rule["recompute_key"]
    tail = config.number(f"{SPEC}.{key}") if key else None
    if tail:
        return
    if config.setting(BACKEND) == rule["paired_attention"]:  # its context pages are reused with the target's
        yield from _paired_pools(config, said)
        return
    fix = "set kv_cache_config.enable_block_reuse to false"
    if key:
        fix += f", or {SPEC}.{key} above 0 (not for sliding-window targets under cache manager V1)"
    make = warning if config.setting(BACKEND) == "TRTLLM" else error  # its pool may be shared with the target's
    reuse_key = "kv_cache_config.enable_block_reuse"
    yield make("prefix-reuse", reuse_key, "false: a hit starves the drafter", said, fix, **{reuse_key: False})


def _paired_pools(config: CheckedConfig, said: str) -> Iterator[Finding]:
    """Settings that keep the drafter's pages from being reused with the target's (`resolve.pairs_pools`)."""
    manager = "kv_cache_config.use_kv_cache_manager_v2"
    cache = None if config.served.target_sizes is None else config.served.target_sizes.cache
    if config.setting(manager) is False:
        yield error(
            "prefix-reuse", manager, "true: V1 pairs no pools, and a hit starves the drafter", "false",
            "set it to true, or kv_cache_config.enable_block_reuse to false",
        )  # fmt: skip
    elif cache is not None and cache.recurrent is not None:
        yield warning(
            "prefix-reuse", "kv_cache_config.enable_block_reuse",
            "false: pools of a target with recurrent states are not paired, and a hit starves the drafter", said,
            "set it to false", **{"kv_cache_config.enable_block_reuse": False},
        )  # fmt: skip
    else:
        yield unchecked(
            "prefix-reuse", "kv_cache_config.enable_block_reuse",
            "whether the drafter gets the managed pool, without which a hit starves it",
            "look for 'using the private ctx arena' in the log",
        )  # fmt: skip


def fp8_context(config: CheckedConfig) -> Iterator[Finding]:
    """The drafter's context is BF16, whatever the target's cache is; the pool's FP8 pages do not fit it."""
    is_fp8 = "fp8" in str(config.setting("kv_cache_config.dtype")).lower()
    if config.setting(BACKEND) == "TRTLLM" and is_fp8:
        yield warning(
            "fp8-context", "kv_cache_config.dtype", "auto with TRTLLM attention: the draft's context is BF16, and in"
            " place of FP8 pages the worker may set aside an arena of its own (dflash.py @ 8d62b3e5)",
            "fp8", "set it to auto, unless the log lacks 'using the private ctx arena'",
        )  # fmt: skip


def context_projection(config: CheckedConfig) -> Iterator[Finding]:
    """The native drafter multiplies with the raw q, k, v and fc weights."""
    names, quantized = quantized_context(config)
    if quantized and config.served.mode == "native":
        yield error(
            "quantized-context", f"{SPEC}.speculative_model", f"unquantised {', '.join(names)} in native mode",
            quantized, "quantise with --recipe nvfp4-native, or serve in engine mode",
        )  # fmt: skip


def mixed_precision(config: CheckedConfig) -> Iterator[Finding]:
    """Algorithms by layer are looked up as model.layers.N..., which a draft's own names, layers.N..., never match."""
    if config.served.mode == "engine" or len(set(config.served.algorithms.values())) < 2:
        return
    yield error(
        "mixed-precision", f"{SPEC}.speculative_model", "one algorithm for all quantised layers in native mode:"
        " TensorRT-LLM looks up those of a mixed checkpoint by names that drafts lack, and silently skips them",
        " and ".join(sorted(set(config.served.algorithms.values()))),
        "quantise with --recipe nvfp4-native or serve in engine mode",
    )  # fmt: skip


def backbone(config: CheckedConfig) -> Iterator[Finding]:
    """config.json must lead to a dense Qwen3 backbone: architectures if registered, else model_type."""
    draft = config.served.draft_sizes
    if config.served.mode == "engine" or draft is None or draft.spec.model_type is None:
        return
    served = config.setting(f"{SPEC}.speculative_model")
    if served == converted_draft(draft):
        if not is_directory(served):
            yield unchecked(
                "backbone", f"{SPEC}.speculative_model", f"{served} is not here yet",
                f"dflash-trt quantize {draft.name} --recipe bf16 -o {served}",
            )  # fmt: skip
        return
    rule = config.schema.rules["backbone"]
    if draft.spec.model_type in rule["model_types"] or set(draft.architectures) & set(rule["architectures"]):
        return
    seen = draft.origin == CHECKPOINT
    yield (error if seen else warning)(
        "backbone",
        f"{draft.name}/config.json: model_type",
        f"{' or '.join(rule['model_types'])}: TensorRT-LLM builds the drafter's layers from it, and those of"
        f" {draft.spec.model_type} have no self_attn.qkv_proj",
        repr(draft.spec.model_type) + ("" if seen else " (published; the file itself has not been seen)"),
        f"write {rule['model_types'][0]} there and keep attention_bias, as dflash-trt quantize --recipe bf16 does",
    )


def same_facts(config: CheckedConfig) -> Iterator[Finding]:
    """Facts repeated from the draft's config.json must match it."""
    draft = config.served.draft_sizes
    if draft is None:
        return
    facts = {"mask_token_id": draft.spec.mask_token_id, "target_layer_ids": list(draft.spec.target_layer_ids)}
    for key, fact in facts.items():
        found = config.setting(f"{SPEC}.{key}")
        if found is not None and fact is not None and found != fact:
            yield error("draft-facts", f"{SPEC}.{key}", f"{fact} (as in {draft.name})", found, f"write {fact}")
    if draft.spec.mask_token_id is None:
        yield unchecked(
            "draft-facts",
            f"{SPEC}.mask_token_id",
            f"not published for {draft.name}; TensorRT-LLM reads it from the draft's config.json",
            "give --draft DIR",
        )


def taps(config: CheckedConfig) -> Iterator[Finding]:
    """The taps of a draft that TensorRT-LLM has yet to download when it reads its arguments."""
    model = config.setting(f"{SPEC}.speculative_model")
    if not isinstance(model, str) or not REPOSITORY_ID.fullmatch(model):
        return
    if config.setting(f"{SPEC}.target_layer_ids") is None and not is_directory(model):
        ids = (
            "the draft's"
            if config.served.draft_sizes is None
            else list(config.served.draft_sizes.spec.target_layer_ids)
        )
        yield warning(
            "taps", f"{SPEC}.target_layer_ids", f"{ids}: where they are not known before the download, nothing is"
            " captured and next to nothing accepted", "no such key",
            f"add {ids}" if config.served.draft_sizes else "add the list of the draft's config.json",
        )  # fmt: skip


def draft_place(config: CheckedConfig) -> Iterator[Finding]:
    """A directory that is not here yet, or on another machine."""
    model = config.setting(f"{SPEC}.speculative_model")
    if not isinstance(model, str) or not model or REPOSITORY_ID.fullmatch(model):
        return
    if not Path(model).is_absolute() and not is_directory(model):
        yield unchecked(
            "draft-place", f"{SPEC}.speculative_model", f"{model}, looked for where the server is started",
            "start it in the directory that holds the draft, or write its whole path",
        )  # fmt: skip


def disk_cache(config: CheckedConfig) -> Iterator[Finding]:
    """A cache on disk needs a directory."""
    size, path = config.number("kv_cache_config.disk_cache_size"), config.setting("kv_cache_config.disk_cache_path")
    if size and not path:
        yield error(
            "disk-cache", "kv_cache_config.disk_cache_path", f"a directory for {size} bytes", "none",
            "set it to a directory, or leave kv_cache_config.disk_cache_size out",
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
    lambda config: check_token_budget(config, bool(config.document.get(SPEC))),
    disk_cache,
    removed,
)
DFLASH_RULES: tuple[Rule, ...] = (
    required,
    lambda config: check_num_draft_tokens(config, config.number(f"{SPEC}.max_draft_len")),
    draft_schedule,
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
