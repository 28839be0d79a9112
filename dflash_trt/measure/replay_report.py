# SPDX-License-Identifier: Apache-2.0
"""What `verify --features` measured: replays of an engine, and perhaps of its reference, put into figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from dflash_trt.engine.manifest import Manifest
from dflash_trt.measure.replay import Replayed
from dflash_trt.measure.sampled_acceptance import Expected, ExpectedLoss, expected, expected_loss, prompt_sums
from dflash_trt.measure.statistics import Mean, TauLoss, mean_tau, tau_loss
from dflash_trt.measure.verification_report import TauDifference
from dflash_trt.quantize.features import FeatureFacts, FeatureFile, PromptFacts
from dflash_trt.runtime.acceptance import PositionAcceptance, acceptance_by_position


class ReplayedPrompt(PromptFacts, frozen=True, kw_only=True):
    """One prompt under one engine."""

    num_prompt_tokens: int
    num_output_tokens: int
    steps: int
    """Verify passes."""
    tau: float | None
    """None without a verify pass."""


class ReplayedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine does over all prompts."""

    source: str
    """Name of the checkpoint that it was built from."""
    quantized_modules: dict[str, int]
    """Number of linear layers by algorithm; empty for an unquantised engine."""
    fp8_kv_cache: bool
    tau: float | None
    """Mean of the prompts' tau."""
    tau_interval: Mean | None
    steps: int
    acceptance: list[PositionAcceptance]
    prompts: list[ReplayedPrompt]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one category or language; `name` None stands for those without one."""

    name: str | None
    tau: Mean | None
    reference_tau: Mean | None
    tau_loss: TauLoss | None


class ReplayComparison(msgspec.Struct, frozen=True, kw_only=True):
    """An engine beside its reference, prompt by prompt."""

    tau_loss: TauLoss | None
    tau_differences: list[TauDifference]


class ExpectedReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `verify --features --temperature` expects of sampling."""

    engine: Expected
    reference: Expected | None
    tau_loss: ExpectedLoss | None


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that `verify --features` measured."""

    block_size: int
    max_tokens: int
    text_temperature: float
    """That the answers were sampled at; 0: greedy."""
    engine: ReplayedEngine
    reference: ReplayedEngine | None
    comparison: ReplayComparison | None
    by_category: list[Part]
    """Empty where no prompt carries a category."""
    by_language: list[Part]
    expected: ExpectedReport | None
    """None unless a temperature was asked for."""


def replay_report(
    facts: FeatureFacts,
    manifest: Manifest,
    replays: Sequence[Replayed],
    reference: tuple[Manifest, Sequence[Replayed]] | None,
    expected: ExpectedReport | None = None,
) -> ReplayReport:
    """The figures of an engine's replays and of its reference's on the same prompts of a file with `facts`."""
    others = None if reference is None else reference[1]
    return ReplayReport(
        block_size=manifest.draft.block_size,
        max_tokens=facts.max_tokens,
        text_temperature=facts.temperature,
        engine=_engine(manifest, replays),
        reference=None if reference is None else _engine(*reference),
        comparison=None if others is None else _compare(replays, others),
        by_category=_parts(replays, others, lambda prompt: prompt.category),
        by_language=_parts(replays, others, lambda prompt: prompt.language),
        expected=expected,
    )


def expected_report(
    features: FeatureFile,
    temperature: float,
    num_draft_tokens: int,
    replays: Sequence[Replayed],
    reference: Sequence[Replayed] | None,
) -> ExpectedReport:
    """What sampling at `temperature` is expected to accept; CheckpointError where the file has no log probabilities."""
    ours = prompt_sums(features, replays, temperature)
    theirs = None if reference is None else prompt_sums(features, reference, temperature)
    return ExpectedReport(
        engine=expected(temperature, ours, num_draft_tokens),
        reference=None if theirs is None else expected(temperature, theirs, num_draft_tokens),
        tau_loss=None if theirs is None else expected_loss(ours, theirs),
    )


def replay_loss(replays: Sequence[Replayed], reference: Sequence[Replayed]) -> TauLoss | None:
    """By how much mean tau falls short of the reference's on the same prompts."""
    pairs = [(a.tau, b.tau) for a, b in zip(replays, reference, strict=True)]
    with_both = [(tau, other) for tau, other in pairs if tau is not None and other is not None]
    return tau_loss([tau for tau, _ in with_both], [other for _, other in with_both])


def _engine(manifest: Manifest, replays: Sequence[Replayed]) -> ReplayedEngine:
    interval = _mean(replays)
    return ReplayedEngine(
        source=manifest.source.name,
        quantized_modules=dict(sorted(Counter(manifest.quantization.modules.values()).items())),
        fp8_kv_cache=manifest.quantization.fp8_kv_cache,
        tau=None if interval is None else interval.mean,
        tau_interval=interval,
        steps=sum(len(prompt.steps) for prompt in replays),
        acceptance=acceptance_by_position(
            (step for prompt in replays for step in prompt.steps), manifest.draft.num_draft_tokens
        ),
        prompts=[
            ReplayedPrompt(
                **msgspec.structs.asdict(replayed.prompt),
                num_prompt_tokens=replayed.num_prompt_tokens,
                num_output_tokens=replayed.num_output_tokens,
                steps=len(replayed.steps),
                tau=replayed.tau,
            )
            for replayed in replays
        ],
    )


def _mean(replays: Sequence[Replayed]) -> Mean | None:
    return mean_tau([prompt.tau for prompt in replays if prompt.tau is not None])


def _compare(replays: Sequence[Replayed], reference: Sequence[Replayed]) -> ReplayComparison:
    return ReplayComparison(
        tau_loss=replay_loss(replays, reference),
        tau_differences=[
            TauDifference(name=prompt.prompt.name, difference=prompt.tau - other.tau)
            for prompt, other in zip(replays, reference, strict=True)
            if prompt.tau is not None and other.tau is not None
        ],
    )


def _parts(
    replays: Sequence[Replayed], reference: Sequence[Replayed] | None, key: Callable[[PromptFacts], str | None]
) -> list[Part]:
    """By what `key` reads of a prompt, sorted, prompts without it last; [] where no prompt has it."""
    names = {key(replayed.prompt) for replayed in replays}
    if names <= {None}:
        return []
    parts = []
    for name in sorted(names, key=lambda name: (name is None, name or "")):
        numbers = [i for i, replayed in enumerate(replays) if key(replayed.prompt) == name]
        own = [replays[i] for i in numbers]
        other = None if reference is None else [reference[i] for i in numbers]
        parts.append(
            Part(
                name=name,
                tau=_mean(own),
                reference_tau=None if other is None else _mean(other),
                tau_loss=None if other is None else replay_loss(own, other),
            )
        )
    return parts
