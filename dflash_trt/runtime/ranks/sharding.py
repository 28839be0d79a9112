# SPDX-License-Identifier: Apache-2.0
"""Shards of a target on transformers, and the facts that must agree on every rank."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import torch
import transformers
from transformers import AutoConfig, PreTrainedConfig
from transformers.distributed import DistributedConfig

from dflash_trt import __version__
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.checkpoint.tokenizer import refusing
from dflash_trt.engine.manifest import sha256
from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.targets.runnable import check_architecture


def target_facts(target: TargetCheckpoint) -> dict[str, str]:
    """Facts that must agree on every rank; of the weights only the headers are compared."""
    weights = [(tensor.name, tensor.dtype, tensor.shape) for tensor in target.weights.values()]
    return {
        "version of dflash-trt": __version__,
        "version of torch": str(torch.__version__),
        "version of transformers": transformers.__version__,
        "sha256 of the target's config.json": sha256(target.directory / "config.json"),
        "sha256 of the target's tensor names and shapes": hashlib.sha256(msgspec.json.encode(weights)).hexdigest(),
    }


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
# Units that are never split between ranks: attention heads, and experts if they are distributed.
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
