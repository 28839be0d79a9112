# SPDX-License-Identifier: Apache-2.0
"""Drafts that descend from DFlash and are something else: recognised, so that they are refused by their name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from dflash_trt.checkpoint.dialects import dspark
from dflash_trt.checkpoint.dialects.dialect import Dialect, Weights, section_keys
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError


def refusal(name: str, recognises: Callable[[Facts], bool], what: str, hint: str) -> Dialect:
    """A dialect whose reader only refuses: the error names `what` it adds, the hint who serves it."""

    def read(config: Facts, weights: Weights) -> NoReturn:
        raise CheckpointError(f"{config.file}: expected a DFlash draft, found a {name} draft ({what})", hint=hint)

    return Dialect(name=name, recognises=recognises, read=read, is_canonical=False)


def named(name: str, *sizes: str) -> Callable[[Facts], bool]:
    """Whether an architecture, the projector, Speculators' type or a key bears `name`, or one of the keys is there."""

    def recognises(config: Facts) -> bool:
        values, section = config.values(), dflash_config(config)
        architectures = values.get("architectures")
        names = [a for a in architectures if isinstance(a, str)] if isinstance(architectures, list) else []
        keys = config.keys() | section_keys(config, "dflash_config")
        return (
            any(name in architecture.lower() for architecture in names)
            or name in (section.get("projector_type"), values.get("speculators_model_type"))
            or any(key in sizes or key.startswith(f"{name}_") for key in keys)
        )

    return recognises


def dflash_config(config: Facts) -> dict[str, object]:
    """The object `dflash_config`; empty where it is missing or not an object."""
    section = config.values().get("dflash_config")
    return section if isinstance(section, dict) else {}


def is_other_dspark(config: Facts) -> bool:
    """Whether it is a DSpark draft that neither `dspark` nor `speculators` reads."""
    is_dspark = named("dspark", "markov_rank", "confidence_head", "enable_confidence_head")
    is_read = dspark.recognises(config) or config.values().get("speculators_model_type") == "dspark"
    return is_dspark(config) and not is_read


REFUSED = (
    refusal(  # vLLM 0.33, model_executor/models/lilicorr.py
        "LiLiCorr",
        named("lilicorr"),
        "a transformer that scores the lattice of candidates",
        "TensorRT-LLM 1.4.0rc1, vLLM 0.33 and llama.cpp serve it",
    ),
    # vLLM 0.33, v1/worker/gpu/spec_decode/xpress
    refusal("XPress", named("xpress"), "a refiner that passes over the block several times", "vLLM 0.33 serves it"),
    # arXiv 2606.02091
    refusal("DFlare", named("dflare"), "a fusion of taps for each layer", "its authors' code serves it"),
    refusal(
        "DSpark",
        is_other_dspark,
        "on another backbone than Qwen3, or without the key markov_rank",
        "vLLM and SGLang serve it",
    ),
    refusal(
        "Domino",
        named("domino", "gru_hidden_dim", "pure_draft_prefix_len"),
        "a GRU that corrects logits from left to right",
        "SGLang serves it",
    ),
)
