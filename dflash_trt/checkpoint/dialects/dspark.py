# SPDX-License-Identifier: Apache-2.0
"""DSpark: z-lab's layout with a Markov head, and blocks whose every row predicts the token behind its own position.

Keys and tensors as in deepseek-ai/DeepSpec @ afdfa7c9 (deepspec/modeling/dspark/qwen3), whose own DFlash drafts
(dflash_qwen3_*_block7) are the same with markov_rank 0, and in vLLM 0.33 (models/qwen3_dspark.py). Attention is never
causal, and layers have no windows.
"""

from __future__ import annotations

from collections.abc import Callable

from dflash_trt.checkpoint.dialects.dialect import (
    Dialect,
    Places,
    Weights,
    has_architecture,
    layers,
    section_keys,
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
    is_ranked = "markov_rank" in config.keys() | section_keys(config, "dflash_config")
    return has_architecture(config, *ARCHITECTURES) and is_ranked and "speculators_model_type" not in config.values()


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a DSpark draft; its tensors say whether embedding and lm_head are its own."""
    # DeepSpec's keys stand at the top.
    places = Places(Facts({"dflash_config": {}} | config.values(), config.file), KEYS)
    if not (place := places.of("sample_from_anchor")).flag("sample_from_anchor", default=True):
        raise place.error("sample_from_anchor", "true, as every published DSpark draft has it")
    if config.number("logit_scale", default=1) != 1:
        raise config.error("logit_scale", "1")
    if any(layer_windows := windows(config)):
        raise config.error("layer_types", f"{len(layer_windows)} times full_attention")
    facts = places.read_facts()
    return DraftSpec(
        **facts,
        model_type=config.text("model_type", choices=("qwen3",)),
        layers=layers(layer_windows, causal=False),
        input_embedding_scale=1,
        own_embedding=EMBEDDING in weights,
        draft_vocab_size=facts["vocab_size"] if f"{HEAD}.weight" in weights else None,
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
