# SPDX-License-Identifier: Apache-2.0
"""DSpark: z-lab's layout with a Markov head, and blocks whose every row predicts the token behind its own position.

Keys and tensors as in deepseek-ai/DeepSpec @ afdfa7c9 (deepspec/modeling/dspark/qwen3), whose own DFlash drafts
(dflash_qwen3_*_block7) are the same with markov_rank 0, and in vLLM 0.33 (models/qwen3_dspark.py). Attention is never
causal, and layers have no windows.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.checkpoint.dialects.dialect import (
    MAX_BLOCK_SIZE,
    Dialect,
    Places,
    Weights,
    layers,
    mask_token,
    read_backbone,
    section_keys,
    taps,
    windows,
)
from dflash_trt.checkpoint.dialects.zlab import canonical
from dflash_trt.checkpoint.draft_spec import EMBEDDING, HEAD, DraftSpec, MarkovHead
from dflash_trt.checkpoint.facts import Facts

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
KEYS = frozenset(
    {
        "block_size", "confidence_head_with_markov", "enable_confidence_head", "markov_head_type", "markov_rank",
        "mask_token_id", "num_anchors", "num_target_layers", "projector_type", "sample_from_anchor", "target_layer_ids",
    }
)  # fmt: skip
MAX_RANK = 8192
WITH_MARKOV = "confidence_head_with_markov"


def recognises(config: Facts) -> bool:
    """Whether it is a DSpark draft on a Qwen3 backbone, in a file of its own."""
    values = config.values()
    names, ranked = values.get("architectures"), "markov_rank" in config.keys() | section_keys(config, "dflash_config")
    is_named = isinstance(names, list) and any(name in ARCHITECTURES for name in names if isinstance(name, str))
    return is_named and ranked and "speculators_model_type" not in values


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a DSpark draft; its tensors say whether embedding and lm_head are its own."""
    places = Places(Facts({"dflash_config": {}} | config.values(), config.file))  # DeepSpec's keys stand at the top
    if unknown := sorted(places.dflash.keys() - KEYS):
        raise places.dflash.error(unknown[0], f"only the keys {', '.join(sorted(KEYS))}")
    if not (place := places.of("sample_from_anchor")).flag("sample_from_anchor", default=True):
        raise place.error("sample_from_anchor", "true, as every published DSpark draft has it")
    if config.number("logit_scale", default=1) != 1:
        raise config.error("logit_scale", "1")
    if any(seen := windows(config)):
        raise config.error("layer_types", f"{len(seen)} times full_attention")
    count, vocab_size = places.of("num_target_layers"), config.integer("vocab_size")
    return DraftSpec(
        **read_backbone(config),
        model_type=config.text("model_type", choices=("qwen3",)),
        attention_bias=config.flag("attention_bias"),
        layers=layers(seen, causal=False),
        vocab_size=vocab_size,
        block_size=places.of("block_size").integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE),
        mask_token_id=mask_token(places.of("mask_token_id"), vocab_size),
        target_layer_ids=taps(places.of("target_layer_ids")),
        num_target_layers=count.optional("num_target_layers", count.integer),
        input_embedding_scale=1,
        own_embedding=EMBEDDING in weights,
        draft_vocab_size=vocab_size if f"{HEAD}.weight" in weights else None,
        markov_head=read_head(places.of),
        sample_from_anchor=True,
    )


def read_head(of: Callable[[str], Facts]) -> MarkovHead | None:
    """The heads, None for rank 0, read where `of` says that a key stands; CheckpointError for one that does not run."""
    rank = of("markov_rank").integer("markov_rank", minimum=0, maximum=MAX_RANK)
    confidence = (switch := of("enable_confidence_head")).flag("enable_confidence_head", default=False)
    if confidence and not (rank and of(WITH_MARKOV).flag(WITH_MARKOV, default=False)):
        raise switch.error("enable_confidence_head", f"false, or true with {WITH_MARKOV} and a markov_rank")
    if rank == 0:
        return None
    kind = (place := of("markov_head_type")).text("markov_head_type", choices=("vanilla", "gated", "rnn"))
    if kind == "rnn":
        raise place.error("markov_head_type", "vanilla or gated (vLLM 0.33 serves rnn)")
    return MarkovHead(rank=rank, is_gated=kind == "gated", confidence=confidence)


DSPARK = Dialect(name="dspark", recognises=recognises, read=read, is_canonical=True, canonical=canonical)
