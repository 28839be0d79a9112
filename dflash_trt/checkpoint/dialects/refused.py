# SPDX-License-Identifier: Apache-2.0
"""Unsupported drafts, recognised so that the error names them and the runtimes that serve them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from dflash_trt.checkpoint.dialects import dspark
from dflash_trt.checkpoint.dialects.dialect import Dialect
from dflash_trt.checkpoint.dialects.shared_keys import architectures, named
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights
from dflash_trt.errors import CheckpointError, cut

TARGETS = ("ForCausalLM", "ForConditionalGeneration")
"""Suffixes of architectures of targets."""


def refusal(name: str, recognises: Callable[[Facts], bool], what: str, hint: str) -> Dialect:
    """A dialect whose reader raises CheckpointError: `what` it adds to DFlash, and a hint on who serves it."""

    def read(config: Facts, weights: Weights) -> NoReturn:
        raise CheckpointError(f"{config.file}: expected a DFlash draft, found a {name} draft ({what})", hint=hint)

    return Dialect(name=name, recognises=recognises, read=read, is_canonical=False)


def is_other_dspark(config: Facts) -> bool:
    """Whether it is a DSpark draft that neither `dspark` nor `speculators` reads, and not a target with one inside."""
    is_dspark = named("dspark", "markov_rank", "confidence_head", "enable_confidence_head")
    is_read = dspark.recognises(config) or config.values().get("speculators_model_type") == "dspark"
    return is_dspark(config) and not is_read and inner_drafter(config) is None


def inner_drafter(config: Facts) -> str | None:
    """Describes a drafter within a target's own weights (DeepSeek-V4's dspark_* keys) and who serves it; else None."""
    is_target = any(name.endswith(TARGETS) and "dspark" not in name.lower() for name in architectures(config))
    if not (is_target and any(key.startswith("dspark_") for key in sorted(config.keys()))):
        return None
    return (
        "a DSpark drafter within its own weights: vLLM 0.33 (method dspark, without a model), SGLang (DSPARK) and"
        " TensorRT-LLM (decoding_type DSpark) serve it; it has no draft checkpoint for dflash-trt"
    )


STRANGERS: dict[str, tuple[tuple[str, ...], str]] = {
    "an EAGLE head": (
        ("eagle",),
        "TensorRT-LLM (decoding_type Eagle3), vLLM (method eagle3) and SGLang (EAGLE3) serve it; in a deployment file"
        " it stands at eagle3, to be compared with",
    ),
    "an MTP head": (
        ("mtp", "nextn"),
        "TensorRT-LLM (decoding_type MTP), vLLM (method mtp) and SGLang (NEXTN) serve it from its target's checkpoint",
    ),
    "a Medusa head": (("medusa",), "vLLM (method medusa) serves it"),
}
"""Drafters of other methods: words in their architecture or Speculators' type, and who serves them."""


def stranger(config: Facts) -> tuple[str, str] | None:
    """Name and hint for a config.json of another drafting method; None for drafts of DFlash's family and targets."""
    words = [*architectures(config), str(config.values().get("speculators_model_type"))]
    for name, (signs, hint) in STRANGERS.items():
        if any(sign in word.lower() for sign in signs for word in words):
            return f"{name} ({cut(words[0])})", hint
    return None


def refuse_stranger(config: Facts) -> None:
    """Raises CheckpointError for a head of another drafting method."""
    if (found := stranger(config)) is not None:
        raise CheckpointError(
            f"{config.file}: expected a draft of DFlash's family, or a target, found {found[0]}", hint=found[1]
        )


def refuse_target(config: Facts) -> None:
    """Raises CheckpointError for a target where a draft is asked for."""
    if (name := next((name for name in architectures(config) if name.endswith(TARGETS)), None)) is not None:
        inner = inner_drafter(config)
        raise CheckpointError(
            f"{config.file}: expected a DFlash draft, found a target ({cut(name)})"
            + (f" with {inner}" if inner else ""),
            hint="give it as --target; drafts that are known for it: dflash-trt drafts TARGET",
        )


REFUSED = (
    refusal(  # vLLM 0.33, v1/worker/gpu/spec_decode/xpress
        "XPress",
        named("xpress"),
        "a refiner that passes over the block several times, arXiv 2608.02438",
        "vLLM 0.33 serves it",
    ),
    refusal(
        "FlashMap",
        named("flashmap"),
        "a flow map that jumps over the block, arXiv 2602.16813",
        "its authors' plugins for SGLang 0.5.20 and vLLM 0.31 serve it",
    ),
    refusal(
        "DFlare",
        named("dflare"),
        "a fusion of taps for each layer, arXiv 2606.02091",
        "its authors' code serves it",
    ),
    refusal(
        "DSpark",
        is_other_dspark,
        "on another backbone than Qwen3, or without the key markov_rank",
        "vLLM and SGLang serve it",
    ),
    # TensorRT-RTX takes no GRU in BF16: findings/tensorrt_rtx_refuses_a_bfloat16_gru.sh
    refusal(
        "Domino",
        named("domino", "gru_hidden_dim", "pure_draft_prefix_len"),
        "a GRU that corrects logits from left to right, arXiv 2605.29707",
        "SGLang 0.5.23 and TensorRT Edge-LLM 0.12 serve it",
    ),
)
