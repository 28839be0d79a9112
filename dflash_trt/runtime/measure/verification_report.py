# SPDX-License-Identifier: Apache-2.0
"""What `verify` may compare, what it measured, and whether that holds what was asked; pure values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.api.acceptance import PositionAcceptance, Step, acceptance_by_position
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.target_checkpoint import TargetSpec
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import CheckpointError, EngineError, VerificationError
from dflash_trt.quantize.bounds import CAPTURE
from dflash_trt.runtime.measure.drafter_error import DrafterError
from dflash_trt.runtime.measure.statistics import Difference, TauLoss, loss_text, tau_loss

if TYPE_CHECKING:
    from dflash_trt.runtime.measure.features import FeatureFacts


NEAR_TIES = (
    "the target ran in bfloat16, and here a block rounds otherwise than one token a pass: a near-tie may have fallen"
    " another way, which is not the drafter's doing; verify with --dtype float32 to tell that from a defect"
)
AGREED = (
    "the target ran in bfloat16, and its blocks equalled one token a pass when that was probed: a defect, or a shape"
    " that was not probed; verify with --dtype float32 to tell"
)


class PromptFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, decoded or replayed by one engine."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    steps: int
    """Verify passes."""
    tau: float | None
    """None without a verify pass."""


class PromptResult(PromptFigures, frozen=True, kw_only=True):
    """One prompt, decoded by one engine."""

    first_difference: Difference | None
    """From plain greedy decoding; None when the tokens are identical."""


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine did over all prompts."""

    source: str
    """Name of the checkpoint that it was built from."""
    quantized_modules: dict[str, int]
    """Number of linear layers by algorithm; empty for an unquantised engine."""
    fp8_kv_cache: bool
    tau: float | None
    """Mean of the prompts' tau."""
    steps: int
    acceptance: list[PositionAcceptance]


class EngineReport(EngineFigures, frozen=True, kw_only=True):
    """What one engine decoded."""

    identical: bool
    """Whether every prompt's tokens equal plain greedy decoding."""
    prompts: list[PromptResult]


class TauDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt under both engines."""

    name: str
    difference: float
    """tau - reference tau."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """An engine beside its reference, prompt by prompt."""

    tau_loss: TauLoss | None
    """None when no prompt had a verify pass."""
    tau_differences: list[TauDifference]
    """By prompt, where both engines had a verify pass."""
    error: DrafterError | None
    """None where answers were replayed."""


def engine_facts(manifest: Manifest, steps: Sequence[Step]) -> dict[str, Any]:
    """All fields of EngineFigures but tau."""
    return {
        "source": manifest.source.name,
        "quantized_modules": dict(sorted(Counter(manifest.quantization.modules.values()).items())),
        "fp8_kv_cache": manifest.quantization.fp8_kv_cache,
        "steps": len(steps),
        "acceptance": acceptance_by_position(steps, manifest.draft.num_draft_tokens),
    }


def compare(
    prompts: Sequence[PromptFigures], reference: Sequence[PromptFigures], error: DrafterError | None = None
) -> Comparison:
    """The same prompts under an engine and its reference."""
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
    """In which the target was computed: "float32" or "bfloat16"."""
    is_batch_invariant: bool
    """Whether, in BF16, a token's numbers were found not to depend on what else is in its pass."""
    engine: EngineReport
    reference: EngineReport | None
    comparison: Comparison | None


def find_failure(report: VerificationReport, max_tau_loss: float | None) -> VerificationError | None:
    """What the engine does not hold: a prompt's tokens differ, or mean tau loses more than `max_tau_loss`."""
    hint = (AGREED if report.is_batch_invariant else NEAR_TIES) if report.target_dtype == "bfloat16" else None
    for name, engine in (("engine", report.engine), ("reference", report.reference)):
        if engine is not None and not engine.identical:
            return VerificationError(f"{name}: {_describe_differences(engine.prompts)}", hint=hint)
    if max_tau_loss is None:
        return None
    return find_loss(None if report.comparison is None else report.comparison.tau_loss, max_tau_loss)


def find_loss(measured: TauLoss | None, max_tau_loss: float) -> VerificationError | None:
    """What a loss of mean tau exceeds, or that none was measured."""
    if measured is None:
        return VerificationError("tau loss: no prompt has a verify pass", hint="give prompts with longer answers")
    if measured.loss > max_tau_loss:
        return VerificationError(
            f"tau loss: expected at most {max_tau_loss:.2%}, found a mean of {loss_text(measured)}",
            hint="choose a recipe that leaves more modules unquantised, or calibrate on prompts like these",
        )
    return None


def _describe_differences(prompts: list[PromptResult]) -> str:
    differing = [(prompt.name, prompt.first_difference) for prompt in prompts if prompt.first_difference is not None]
    name, first = differing[0]
    expected, actual = ("the end" if token is None else token for token in (first.expected, first.found))
    return (
        f"expected the tokens of plain greedy decoding, found others in {len(differing)} of {len(prompts)} prompts;"
        f" the first is {name!r}, output token {first.position}: expected {expected}, found {actual}"
    )


DIFFERENT = {("draft", "model_type"), ("draft", "draft_vocab_size")}


def check_reference(manifest: Manifest, reference: Manifest, name: str) -> None:
    """Raises EngineError when `reference`, called `name`, is no measure for `manifest`'s engine.

    model_type may differ, which `quantize` changes, and so may the head, which `build --head` adds.
    """
    hint = "give --reference an engine built from the unquantised checkpoint of the same draft"
    for part, facts in (("draft", DraftSpec), ("target", TargetSpec)):
        names = [fact for fact in facts.__struct_fields__ if (part, fact) not in DIFFERENT]
        if difference := _difference(names, getattr(manifest, part), getattr(reference, part)):
            raise EngineError(f"reference {name} is an engine of another {part}: {difference}", hint=hint)
    quantization = reference.quantization
    if quantization.algorithms():
        modules = [f"{algorithm} in {module}" for module, algorithm in quantization.modules.items()]
        found = f"{modules[0]} ({len(modules)} quantised modules)" if modules else "an FP8 context cache"
        raise EngineError(f"reference {name}: expected an unquantised engine, found {found}", hint=hint)


def check_features(manifest: Manifest, facts: FeatureFacts, features: str, engine: str) -> None:
    """Raises CheckpointError when `features` were captured from another target than `engine` was built for."""
    if difference := _difference(TargetSpec.__struct_fields__, manifest.target, facts.target):
        raise CheckpointError(
            f"{features} was captured from {facts.target_name}, another target than {engine} was built for:"
            f" {difference}",
            hint=f"capture with the engine's target: {CAPTURE}",
        )


def _difference(names: Iterable[str], expected: object, actual: object) -> str | None:
    """The first of the facts `names` that is not the same in both."""
    pairs = ((name, getattr(expected, name), getattr(actual, name)) for name in names)
    return next((f"{name}: expected {a}, found {b}" for name, a, b in pairs if a != b), None)
