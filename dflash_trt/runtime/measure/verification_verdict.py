# SPDX-License-Identifier: Apache-2.0
"""The verdict of `verify`: tokens of plain decoding, a tau worth drafting for, and no more loss than allowed."""

from __future__ import annotations

from dflash_trt.api.acceptance import NEAR_ZERO_TAU
from dflash_trt.errors import VerificationError
from dflash_trt.runtime.measure.statistics import TauLoss, loss_text
from dflash_trt.runtime.measure.verification_report import EngineFigures, PromptResult, VerificationReport

NEAR_TIES = (
    "the target ran in bfloat16, and here a block rounds otherwise than one token a pass: a near-tie may have fallen"
    " another way, which is not the drafter's doing; verify with --dtype float32 to tell that from a defect"
)
AGREED = (
    "the target ran in bfloat16, and its blocks equalled one token a pass when that was probed: a defect, or a shape"
    " that was not probed; verify with --dtype float32 to tell"
)
MIN_STEPS = 20
"""Verify passes below which a low tau says little."""


def find_failure(report: VerificationReport, max_tau_loss: float | None) -> VerificationError | None:
    """Error if a prompt's tokens differ, mean tau loses more than `max_tau_loss` or is next to nothing, else None."""
    hint = (AGREED if report.is_batch_invariant else NEAR_TIES) if report.target_dtype == "bfloat16" else None
    for name, engine in (("engine", report.engine), ("reference", report.reference)):
        if engine is not None and not engine.identical:
            return VerificationError(f"{name}: {_describe_differences(engine.prompts)}", hint=hint)
    measured = None if report.comparison is None else report.comparison.tau_loss
    lost = None if max_tau_loss is None else find_loss(measured, max_tau_loss)
    return lost or find_useless(report.engine)


def unmeasured() -> VerificationError:
    """Error where no verify pass had a draft."""
    return VerificationError(
        "tau: not measured, no verify pass had a draft",
        hint="take prompts with longer answers; where they are captured: dflash-trt capture --max-tokens 256",
    )


def find_useless(engine: EngineFigures) -> VerificationError | None:
    """Error if nearly every draft is rejected, or none was verified."""
    if engine.tau is None:
        return unmeasured()
    if engine.steps < MIN_STEPS or engine.tau >= NEAR_ZERO_TAU:
        return None
    return VerificationError(
        f"acceptance length {engine.tau:.2f} is below {NEAR_ZERO_TAU}: nearly every draft token is rejected",
        hint="equal shapes do not show it: another target than the one that the draft was trained for, target_layer_ids"
        " or mask_token_id of another numbering, or untrained weights; compare config.json with the published one",
    )


def find_loss(measured: TauLoss | None, max_tau_loss: float) -> VerificationError | None:
    """Error if mean tau loses more than `max_tau_loss` or no loss was measured, else None."""
    if measured is None:
        return unmeasured()
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
        f"{len(differing)} of {len(prompts)} prompts differ from greedy decoding without speculation;"
        f" the first is {name!r}, output token {first.position}: expected {expected}, found {actual}"
    )
