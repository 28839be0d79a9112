# SPDX-License-Identifier: Apache-2.0
"""Rules for the draft that TensorRT-LLM loads: its weights, its facts and where it lies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash_trt.checkpoint.source import REPOSITORY_ID
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.rules.checked_config import CheckedConfig, error, quantized_context, unchecked, warning
from dflash_trt.deploy.rules.trtllm_cache_rules import SPEC
from dflash_trt.deploy.sizes import CHECKPOINT
from dflash_trt.deploy.trtllm_arguments import converted_draft, place
from dflash_trt.files.command import command_line
from dflash_trt.files.read import is_directory


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
    if served == (copy := converted_draft(draft)):
        if not is_directory(served):
            fix = command_line(["dflash-trt", "quantize", draft.name, "--recipe", "bf16", "-o", copy])
            yield unchecked("backbone", f"{SPEC}.speculative_model", f"{served} is not here yet", fix)
        return
    if config.served.algorithms != draft.quantized and served != place(draft.name):
        return  # a recipe's copy, which has a dense backbone
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
