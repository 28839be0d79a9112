# SPDX-License-Identifier: Apache-2.0
"""Checks of what `verify` may compare, its report, and the verdict; pure values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dflash_trt.api.acceptance import NEAR_ZERO_TAU, Step
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.target_checkpoint import TargetSpec
from dflash_trt.engine.graph.draft_graph import output_name
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import CheckpointError, EngineError, VerificationError
from dflash_trt.quantize.bounds import CAPTURE
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.measure.statistics import (
    Difference,
    PositionAcceptance,
    TauLoss,
    acceptance_by_position,
    loss_text,
    relative_error,
    tau_loss,
)

if TYPE_CHECKING:
    import torch

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
    """Emitted tokens per verify pass; None without one."""


class PromptResult(PromptFigures, frozen=True, kw_only=True):
    """One prompt, decoded by one engine."""

    first_difference: Difference | None
    """First difference from plain greedy decoding; None when the tokens are identical."""


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one engine over all prompts."""

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
    """Figures of one engine that decoded all prompts."""

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
    """Loss over the prompts with a verify pass; None without one."""
    tau_differences: list[TauDifference]
    """Differences of the prompts with a verify pass under both engines."""
    error: DrafterError | None
    """Errors by layer; None where answers were replayed."""


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


def find_failure(report: VerificationReport, max_tau_loss: float | None) -> VerificationError | None:
    """Error if a prompt's tokens differ, mean tau loses more than `max_tau_loss` or is next to nothing, else None."""
    hint = (AGREED if report.is_batch_invariant else NEAR_TIES) if report.target_dtype == "bfloat16" else None
    for name, engine in (("engine", report.engine), ("reference", report.reference)):
        if engine is not None and not engine.identical:
            return VerificationError(f"{name}: {_describe_differences(engine.prompts)}", hint=hint)
    measured = None if report.comparison is None else report.comparison.tau_loss
    lost = None if max_tau_loss is None else find_loss(measured, max_tau_loss)
    return lost or find_useless(report.engine)


MIN_STEPS = 20
"""Verify passes below which a low tau says little."""


def find_useless(engine: EngineFigures) -> VerificationError | None:
    """Error if nearly every draft is rejected, or none was verified."""
    if engine.tau is None:
        return VerificationError("tau: not measured, no prompt has a verify pass", hint="give longer answers")
    if engine.steps < MIN_STEPS or engine.tau >= NEAR_ZERO_TAU:
        return None
    return VerificationError(
        f"tau: expected at least {NEAR_ZERO_TAU}, found {engine.tau:.2f}: nearly every draft is rejected",
        hint="wrong tensors or another target's draft: dflash-trt inspect ENGINE; build it from the published one",
    )


def find_loss(measured: TauLoss | None, max_tau_loss: float) -> VerificationError | None:
    """Error if mean tau loses more than `max_tau_loss` or no loss was measured, else None."""
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


BLOCKS_APART = 8
"""Blocks 0, 8, 16, ... of a prompt are compared: neighbours see nearly the same context."""


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


def exposed_values(spec: DraftSpec) -> list[str]:
    """The values inside draft.onnx that a comparison reads."""
    return [output_name(layer) for layer in range(len(spec.layers))]


class ComparingDrafter(Drafter):
    """A drafter that runs `reference` beside it on the same input, for one request at a time.

    Each makes its own context from the taps. Both must have been opened with `exposed_values`.
    """

    def __init__(self, drafter: Drafter, reference: Drafter) -> None:
        super().__init__(drafter.executor, drafter.spec, drafter.cache, drafter.embedding, drafter.scorer)
        self.cache_bytes_per_token += reference.cache_bytes_per_token
        self._reference = reference
        self._blocks = 0
        self._errors: list[list[float]] = []  # [blocks, L + 1 + 2 * L]: values, then k, then v by layer

    def reserve(self, slot: int, pages: Sequence[int], num_rows: int) -> None:
        """Reserves the same pages for both contexts."""
        super().reserve(slot, pages, num_rows)
        self._reference.reserve(slot, pages, num_rows)

    def inject(self, slots: Sequence[int], num_rows: Sequence[int], taps: torch.Tensor) -> None:
        """Appends context rows made from the taps [T, A*H] to both contexts."""
        super().inject(slots, num_rows, taps)
        self._reference.inject(slots, num_rows, taps)

    def run(self, slots: Sequence[int], noise_embeds: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The drafter's outputs; every BLOCKS_APART-th block is compared with the reference's."""
        outputs = super().run(slots, noise_embeds)
        if self._blocks % BLOCKS_APART == 0:
            self._compare(slots, outputs, self._reference.run(slots, noise_embeds))
        self._blocks += 1
        return outputs

    def release(self, slot: int) -> None:
        """Empties a slot's context and counts blocks from 0 again."""
        self._blocks = 0
        super().release(slot)
        self._reference.release(slot)

    def error(self) -> DrafterError | None:
        """The errors so far; None before the first block."""
        if not self._errors:
            return None
        num_layers = len(self.spec.layers)
        means = np.mean(self._errors, axis=0).tolist()
        outputs, (hidden, *context) = means[:num_layers], means[num_layers:]
        rows = zip(outputs, context[:num_layers], context[num_layers:], strict=True)
        layers = [LayerError(layer=i, output=output, k=k, v=v) for i, (output, k, v) in enumerate(rows)]
        return DrafterError(num_blocks=len(self._errors), layers=layers, hidden=hidden)

    def _compare(
        self, slots: Sequence[int], outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> None:
        names = [*exposed_values(self.spec), "hidden"]
        errors = [relative_error(outputs[name], expected[name]) for name in names]
        (slot,) = slots
        for kv, reference_kv in zip(self.cache.rows(slot), self._reference.cache.rows(slot), strict=True):
            errors += [relative_error(*layer) for layer in zip(kv, reference_kv, strict=True)]
        self._errors.append(errors)
