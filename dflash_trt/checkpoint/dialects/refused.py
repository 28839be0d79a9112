# SPDX-License-Identifier: Apache-2.0
"""Drafts that descend from DFlash and are something else: recognised, so that they are refused by their name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from dflash_trt.checkpoint.dialects.dialect import Dialect, Weights, config_equals, section_keys
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError


def refusal(name: str, recognises: Callable[[Facts], bool], what: str, hint: str) -> Dialect:
    """A dialect whose reader only says that it is none of ours: `what` it adds, and who serves it."""

    def read(config: Facts, weights: Weights) -> NoReturn:
        raise CheckpointError(f"{config.file}: expected a DFlash draft, found a {name} draft ({what})", hint=hint)

    return Dialect(name=name, recognises=recognises, read=read, is_canonical=False)


def is_named(config: Facts, name: str) -> bool:
    """Whether any architecture has `name` in it, in whatever case."""
    architectures = config.values().get("architectures")
    names = architectures if isinstance(architectures, list) else []
    return any(name.lower() in architecture.lower() for architecture in names if isinstance(architecture, str))


def dflash_config(config: Facts) -> dict[str, object]:
    """What stands there, where it is an object."""
    section = config.values().get("dflash_config")
    return section if isinstance(section, dict) else {}


def is_dspark(config: Facts) -> bool:
    """By any architecture that bears the name, Speculators' type, or its own keys."""
    keys = {"markov_rank", "confidence_head", "enable_confidence_head"}
    return (
        is_named(config, "dspark")
        or config_equals(config, "speculators_model_type", "dspark")
        or "dspark_config" in config
        or bool((section_keys(config, "dflash_config") | config.keys()) & keys)
    )


def has_no_markov_head(config: Facts) -> bool:
    """Whether it is DeepSeek's DFlash in DSpark's architecture (dflash_qwen3_*_block7): a Markov head of rank 0."""
    ranks = [section.get("markov_rank") for section in (config.values(), dflash_config(config))]
    return is_dspark(config) and 0 in ranks and not any(ranks)


def is_domino(config: Facts) -> bool:
    """By the projector that corrects logits, or the sizes of it."""
    keys = {"gru_hidden_dim", "pure_draft_prefix_len"}
    section = dflash_config(config)
    return section.get("projector_type") == "domino" or bool(section.keys() & keys)


def is_lilicorr(config: Facts) -> bool:
    """By architecture, projector, switch, or any of its sizes (vLLM 0.33, model_executor/models/lilicorr.py)."""
    section = dflash_config(config)
    keys = section.keys() | config.keys()
    return (
        is_named(config, "lilicorr")
        or section.get("projector_type") == "lilicorr"
        or any(key.startswith("lilicorr_") for key in keys)
    )


def is_xpress(config: Facts) -> bool:
    """By architecture, or any of its sizes (vLLM 0.33, v1/worker/gpu/spec_decode/xpress)."""
    keys = dflash_config(config).keys() | config.keys()
    return is_named(config, "xpress") or any(key.startswith("xpress_") for key in keys)


def is_dflare(config: Facts) -> bool:
    """By architecture: each layer of it fuses the taps with weights of its own (arXiv 2606.02091)."""
    return is_named(config, "dflare")


DEEPSEEK_DFLASH = refusal(
    "DeepSeek DFlash",
    has_no_markov_head,
    "no Markov head, but each slot proposes the token behind its own position, the first one, too",
    "vLLM serves it with the method dspark (vllm-project/vllm#49646)",
)
DSPARK = refusal(
    "DSpark",
    is_dspark,
    "a Markov head and a confidence head, and it predicts from the block's first slot, too",
    "vLLM and SGLang serve it",
)
DOMINO = refusal("Domino", is_domino, "a GRU that corrects logits from left to right", "SGLang serves it")
LILICORR = refusal(
    "LiLiCorr",
    is_lilicorr,
    "a transformer that scores the lattice of candidates",
    "TensorRT-LLM 1.4.0rc1, vLLM 0.33 and llama.cpp serve it",
)
XPRESS = refusal("XPress", is_xpress, "a refiner that passes over the block several times", "vLLM 0.33 serves it")
DFLARE = refusal("DFlare", is_dflare, "a fusion of taps for each layer", "its authors' code serves it")
REFUSED = (LILICORR, XPRESS, DFLARE, DEEPSEEK_DFLASH, DSPARK, DOMINO)
