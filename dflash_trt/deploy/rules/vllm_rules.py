# SPDX-License-Identifier: Apache-2.0
"""What vLLM's arguments must agree on."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import (
    Context,
    Rule,
    check_draft_tokens,
    check_token_budget,
    error,
    quantized_modules,
    warning,
)
from dflash_trt.deploy.rules.memory_rules import check_memory

SPEC = "speculative_config"


def _method(context: Context) -> str | None:
    spec = context.document.get(SPEC)
    return str(spec.get("method")) if isinstance(spec, dict) else None


def required(context: Context) -> Iterator[Finding]:
    """A draft model and its K."""
    needed = context.schema.rules["required"]["methods"].get(_method(context) or "", [])
    for key in needed:
        if context.setting(f"{SPEC}.{key}") is None:
            yield error("missing-key", f"{SPEC}.{key}", f"a value for {_method(context)}", "no such key", f"add {key}")


def renamed(context: Context) -> Iterator[Finding]:
    """Keys that vLLM only knows in order to refuse them."""
    for key, name in context.schema.rules["renamed"]["keys"].items():
        if context.is_set(f"{SPEC}.{key}"):
            yield error("renamed-key", f"{SPEC}.{key}", f"{name} in its place", "this key", f"write {name}")


def draft_parallel(context: Context) -> Iterator[Finding]:
    """The drafter runs on one rank or on all."""
    draft = context.number(f"{SPEC}.draft_tensor_parallel_size") if _method(context) else None
    tensor = context.number("tensor_parallel_size") or 1
    if draft is not None and draft not in (1, tensor):
        key = f"{SPEC}.draft_tensor_parallel_size"
        yield error("parallelism", key, f"1 or tensor_parallel_size {tensor}", draft, f"set it to {tensor}")


def gpu_count(context: Context) -> Iterator[Finding]:
    """Ranks and GPUs."""
    tensor, pipeline = context.number("tensor_parallel_size") or 1, context.number("pipeline_parallel_size") or 1
    data = context.number("data_parallel_size") or 1
    if context.gpus is not None and tensor * pipeline * data > context.gpus.count:
        yield error(
            "parallelism", "tensor_parallel_size", f"at most the {context.gpus.count} GPUs of {context.gpus}",
            f"{tensor * pipeline * data} ranks", f"set it to {context.gpus.count // (pipeline * data) or 1}",
        )  # fmt: skip


def draft_length(context: Context) -> Iterator[Finding]:
    """K <= block_size - 1."""
    if _method(context) == "dflash":
        key = f"{SPEC}.num_speculative_tokens"
        yield from check_draft_tokens(context, key, context.number(key))


def token_budget(context: Context) -> Iterator[Finding]:
    """max_num_seqs * (1 + K) <= max_num_batched_tokens."""
    draft_tokens = context.number(f"{SPEC}.num_speculative_tokens") if _method(context) else None
    yield from check_token_budget(context, "max_num_seqs", "max_num_batched_tokens", draft_tokens)


def quantized_context(context: Context) -> Iterator[Finding]:
    """A quantised q, k or v loses the fused context projection, and in some releases fails to load."""
    if _method(context) != "dflash":
        return
    names = context.schema.rules["quantized_context"]["modules"]
    if modules := quantized_modules(context, names):
        yield warning(
            "quantized-context", f"{SPEC}.model", f"unquantised {', '.join(names)}",
            f"{modules[0]} and {len(modules) - 1} more in {context.algorithms[modules[0]]}",
            "quantise with --recipe nvfp4-native",
        )  # fmt: skip


def memory(context: Context) -> Iterator[Finding]:
    """What fits the GPU."""
    if _method(context) == "dflash":
        yield from check_memory(context)


RULES: tuple[Rule, ...] = (
    required,
    renamed,
    draft_parallel,
    gpu_count,
    draft_length,
    token_budget,
    quantized_context,
    memory,
)
