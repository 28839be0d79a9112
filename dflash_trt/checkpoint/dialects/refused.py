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


def is_dflash2(config: Facts) -> bool:
    """By architecture, Speculators' type, or the keys of convolution and selector."""
    keys = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "dflashv2_selector"}
    return (
        config_equals(config, "architectures", "DFlash2DraftModel")
        or config_equals(config, "speculators_model_type", "dflash2")
        or bool(section_keys(config, "dflash_config") & keys)
    )


def is_dspark(config: Facts) -> bool:
    """By any architecture that bears the name, Speculators' type, or its own keys."""
    architectures = config.values().get("architectures")
    named = isinstance(architectures, list) and any(isinstance(a, str) and "DSpark" in a for a in architectures)
    keys = {"markov_rank", "confidence_head", "enable_confidence_head"}
    return (
        named
        or config_equals(config, "speculators_model_type", "dspark")
        or "dspark_config" in config
        or bool((section_keys(config, "dflash_config") | config.keys()) & keys)
    )


def is_domino(config: Facts) -> bool:
    """By the projector that corrects logits, or the sizes of it."""
    values = config.values().get("dflash_config")
    dflash = values if isinstance(values, dict) else {}
    return dflash.get("projector_type") == "domino" or bool(dflash.keys() & {"gru_hidden_dim", "pure_draft_prefix_len"})


# DFlash2's place: a reader of its own replaces this entry, with the tensors of convolutions and candidate selector.
DFLASH2 = refusal(
    "DFlash2",
    is_dflash2,
    "convolutions around attention and MLP, and a candidate selector, which no graph here has",
    "vLLM and SGLang serve it",
)
DSPARK = refusal(
    "DSpark",
    is_dspark,
    "a Markov head and a confidence head, and it predicts from the block's first slot, too",
    "vLLM and SGLang serve it",
)
DOMINO = refusal("Domino", is_domino, "a GRU that corrects logits from left to right", "SGLang serves it")
REFUSED = (DFLASH2, DSPARK, DOMINO)
