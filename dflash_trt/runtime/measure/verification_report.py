# SPDX-License-Identifier: Apache-2.0
"""The figures that `verify` reports: of each prompt, of each engine, and of an engine beside its reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from dflash_trt.api.acceptance import Step
from dflash_trt.engine.manifest import Manifest
from dflash_trt.runtime.measure.statistics import (
    Difference,
    PositionAcceptance,
    TauLoss,
    acceptance_by_position,
    tau_loss,
)


class PromptFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, decoded or replayed by one engine."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    steps: int
    """Verify passes."""
    tau: float | None
    """Emitted tokens per verify pass; None without one, and where a replay had no room for a draft."""


class PromptResult(PromptFigures, frozen=True, kw_only=True):
    """One prompt, decoded by one engine."""

    first_difference: Difference | None
    """First difference from plain greedy decoding; None when the tokens are identical."""


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one engine over all prompts."""

    source: str
    """Name of the checkpoint that it was built from."""
    kind: str
    """Kind of the draft: DFlash, DFlash2, LiLiCorr, ..."""
    quantized_modules: dict[str, int]
    """Number of linear layers by algorithm; empty for an unquantised engine."""
    fp8_kv_cache: bool
    tau: float | None
    """Mean of the prompts' tau."""
    steps: int
    acceptance: list[PositionAcceptance]


class EngineReport(EngineFigures, frozen=True, kw_only=True):
    """Figures of one engine that decoded all prompts."""

    identical: bool
    """Whether every prompt's tokens equal plain greedy decoding."""
    prompts: list[PromptResult]


class TauDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt under both engines."""

    name: str
    difference: float
    """tau - reference tau."""


class LayerError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of one draft layer."""

    layer: int
    output: float
    """Error of the residual stream after the layer, all S rows of the block."""
    k: float
    """Error of all rows of the context's K."""
    v: float


class DrafterError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors, each a mean over the compared blocks."""

    num_blocks: int
    layers: list[LayerError]
    hidden: float
    """Error of the final hidden states, which the lm_head reads."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """An engine beside its reference, prompt by prompt."""

    tau_loss: TauLoss | None
    """Loss over the prompts with a verify pass; None without one."""
    tau_differences: list[TauDifference]
    """Differences of the prompts with a verify pass under both engines."""
    error: DrafterError | None
    """Errors by layer; None where answers were replayed."""


def engine_facts(manifest: Manifest, steps: Sequence[Step]) -> dict[str, Any]:
    """All fields of EngineFigures but tau."""
    return {
        "source": manifest.source.name,
        "kind": manifest.draft.kind,
        "quantized_modules": dict(sorted(Counter(manifest.quantization.modules.values()).items())),
        "fp8_kv_cache": manifest.quantization.fp8_kv_cache,
        "steps": len(steps),
        "acceptance": acceptance_by_position(steps, manifest.draft.num_draft_tokens),
    }


def compare(
    prompts: Sequence[PromptFigures], reference: Sequence[PromptFigures], error: DrafterError | None = None
) -> Comparison:
    """Compares the same prompts under an engine and its reference."""
    return Comparison(
        tau_loss=tau_loss([prompt.tau for prompt in prompts], [prompt.tau for prompt in reference]),
        tau_differences=[
            TauDifference(name=a.name, difference=a.tau - b.tau)
            for a, b in zip(prompts, reference, strict=True)
            if a.tau is not None and b.tau is not None
        ],
        error=error,
    )


class VerificationReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that `verify` measured."""

    block_size: int
    max_tokens: int
    target_dtype: str
    """Type that the target was computed in: "float32" or "bfloat16"."""
    is_batch_invariant: bool
    """Whether, in BF16, a token's numbers were found not to depend on what else is in its pass."""
    engine: EngineReport
    reference: EngineReport | None
    comparison: Comparison | None
