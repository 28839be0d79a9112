# SPDX-License-Identifier: Apache-2.0
"""Which targets transformers runs here, in which type, and in which shards: asked before any weight is loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, __version__
from transformers.distributed import DistributedConfig

from dflash_trt.api.runtime_options import check_dtype
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.refusing import refusing
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.errors import CheckpointError

NOT_RUN = {
    "kimi_k2": "a model that transformers has code for; this one's is its checkpoint's own, which is never run",
    "modelopt": "weights that transformers reads; it knows no ModelOpt checkpoint",
    "compressed-tensors": "weights that transformers reads; it needs the package compressed-tensors for these",
}
"""A model_type or quant_method that transformers 5.23 does not run here, and what was expected in its place."""


def check_architecture(directory: Path) -> None:
    """Raises CheckpointError for a target that transformers does not run, with the runtime that does."""
    config = Facts.load(directory / "config.json")
    model_type = config.text("model_type")
    nested = [config.section("text_config")] if "text_config" in config else []
    quantised = [facts.section("quantization_config") for facts in (config, *nested) if "quantization_config" in facts]
    # Below images, transformers does have code for kimi_k2: deepseek_v3's.
    for facts in (config, *quantised):
        for key in ("model_type", "quant_method"):
            value = facts.optional(key, facts.text)
            is_loaded = value == "compressed-tensors" and find_spec("compressed_tensors") is not None
            if value in NOT_RUN and not is_loaded:
                runtimes = "TensorRT-LLM, vLLM or SGLang" if value == "modelopt" else "vLLM or SGLang"
                raise facts.error(key, NOT_RUN[value], hint=_elsewhere(runtimes))
    if model_type in CONFIG_MAPPING:
        return
    own = " (the checkpoint brings its own code along, which is never run)" if "auto_map" in config else ""
    raise config.error(
        "model_type",
        f"a model that transformers {__version__} has code for{own}",
        hint=_elsewhere("TensorRT-LLM, vLLM or SGLang"),
    )


def _elsewhere(runtimes: str) -> str:
    return f"serve this target with {runtimes}: dflash-trt serve-config --list"


FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def target_dtype(asked: str, directory: Path, weights: Mapping[str, StoredTensor]) -> torch.dtype:
    """The type to compute a target in, whose tensors are `weights`.

    `auto` is FLOAT: it holds each value of a BF16, F16 or F32 checkpoint, and what a block rounds otherwise than a
    token alone is too small to flip a choice. Raises RequestError for no such type, CheckpointError for BF16 where the
    checkpoint is of another, which it would round.
    """
    check_dtype(asked)
    if asked != "bfloat16":
        return torch.float32
    sizes: Counter[str] = Counter()
    for tensor in weights.values():
        sizes[tensor.dtype] += math.prod(tensor.shape)
    stored = max((name for name in FLOATS if sizes[name]), key=lambda name: sizes[name], default="BF16")
    if sizes["F16"]:
        stored = "F16"
    if stored != "BF16":
        example = next(tensor for tensor in weights.values() if tensor.dtype == stored)
        raise CheckpointError(
            f"{directory}: dtype bfloat16: expected weights in bfloat16, found {FLOATS[stored]} ({example.name}), which"
            " bfloat16 would round",
            hint="decode it with --dtype float32, which holds every value",
        )
    return torch.bfloat16


# transformers 5.23 shards gpt-oss's lm_head and, as expert parallelism, its experts; this adds what it leaves whole
# on every rank. A sink belongs to its query head; being a bare parameter, it needs its owner to run on local tensors.
GPT_OSS_PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn": "local_params",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.self_attn.sinks": "colwise",
}
# What a rank holds whole pieces of: attention heads, and experts where they are spread out.
HEADS = ("num_attention_heads", "num_key_value_heads")
EXPERTS = "num_local_experts"


def sharding(directory: Path, num_ranks: int) -> DistributedConfig:
    """Configuration with which `from_pretrained` shards the target in `directory`; the ranks have joined before.

    Raises CheckpointError for a model without a plan, or whose parts `num_ranks` does not divide.
    """
    check_architecture(directory)
    with refusing(directory, "a configuration that transformers loads"):
        loaded = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        config = loaded.get_text_config()
    is_gpt_oss = config.model_type == "gpt_oss"
    if not is_gpt_oss and not config.base_model_tp_plan:
        raise CheckpointError(
            f"{directory}: model_type: expected one that transformers has a tensor-parallel plan for, found"
            f" {config.model_type}",
            hint="decode it on one rank: leave --tp out",
        )
    _check_divisible(directory, config, (*HEADS, EXPERTS) if is_gpt_oss else HEADS, num_ranks)
    if is_gpt_oss:
        return DistributedConfig(tp_size=num_ranks, ep_size=num_ranks, tp_plan=GPT_OSS_PLAN)
    return DistributedConfig(tp_size=num_ranks)


def _check_divisible(directory: Path, config: PreTrainedConfig, facts: tuple[str, ...], num_ranks: int) -> None:
    layers = list(config.per_layer_config)  # Gemma 4's full layers have other heads than its sliding ones
    counts = {(fact, getattr(layer, fact)) for layer in layers for fact in facts if hasattr(layer, fact)}
    for fact, count in sorted(counts):
        if count % num_ranks:
            most = max(n for n in range(1, num_ranks) if all(c % n == 0 for _, c in counts))
            raise CheckpointError(
                f"{directory}: {fact}: expected a multiple of the number of ranks, {num_ranks}, found {count}",
                hint=f"start {most} {'rank' if most == 1 else 'ranks'} with --tp {most}",
            )
