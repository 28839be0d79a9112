# SPDX-License-Identifier: Apache-2.0
"""`verify --features`: acceptance on captured answers, without the target, of an engine and perhaps its reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.measure.features import open_features
from dflash_trt.runtime.measure.replay import BATCH_SIZE, Replayed, replay
from dflash_trt.runtime.measure.statistics import Mean, TauLoss, mean_tau, tau_loss
from dflash_trt.runtime.measure.verification_report import (
    Comparison,
    EngineFigures,
    PromptFigures,
    check_features,
    check_reference,
    compare,
    engine_facts,
)

Progress = Callable[[int, str], AbstractContextManager[Callable[[], None]]]
"""From the number of prompts and a label: what is called after each."""


class ReplayedPrompt(PromptFigures, frozen=True, kw_only=True):
    """One prompt under one engine, and what the prompts' file says of it."""

    category: str | None
    language: str | None


class ReplayedEngine(EngineFigures, frozen=True, kw_only=True):
    """What one engine does over all prompts."""

    tau_interval: Mean | None
    prompts: list[ReplayedPrompt]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one category or language; `name` None stands for those without one."""

    name: str | None
    tau: Mean | None
    reference_tau: Mean | None
    tau_loss: TauLoss | None


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that `verify --features` measured."""

    block_size: int
    max_tokens: int
    text_temperature: float
    """That the answers were sampled at; 0: greedy."""
    engine: ReplayedEngine
    reference: ReplayedEngine | None
    comparison: Comparison | None
    by_category: list[Part]
    """Empty where no prompt carries a category."""
    by_language: list[Part]


def verify_features(engine: Path, features: Path, reference: Path | None, progress: Progress) -> ReplayReport:
    """Replays the captured answers with the engine and its reference."""
    directories = [engine, *([] if reference is None else [reference])]
    manifests = [read_manifest(directory) for directory in directories]
    if reference is not None:
        check_reference(manifests[0], manifests[1], str(reference))
    with open_features(features, manifests[0].draft) as file:
        check_features(manifests[0], file.facts, str(features), str(engine))
        with progress(file.facts.num_sequences * len(manifests), "prompts") as advance:
            replays = [
                replay(file, open_drafter(directory, manifest, num_slots=BATCH_SIZE), on_prompt=advance)
                for directory, manifest in zip(directories, manifests, strict=True)
            ]
        figures, *baselines = map(_engine, manifests, replays)
        baseline = baselines[0] if baselines else None
        return ReplayReport(
            block_size=manifests[0].draft.block_size,
            max_tokens=file.facts.max_tokens,
            text_temperature=file.facts.temperature,
            engine=figures,
            reference=baseline,
            comparison=None if baseline is None else compare(figures.prompts, baseline.prompts),
            by_category=_parts(figures, baseline, lambda prompt: prompt.category),
            by_language=_parts(figures, baseline, lambda prompt: prompt.language),
        )


def _engine(manifest: Manifest, replays: Sequence[Replayed]) -> ReplayedEngine:
    interval = mean_tau([replayed.tau for replayed in replays])
    return ReplayedEngine(
        **engine_facts(manifest, [step for replayed in replays for step in replayed.steps]),
        tau=None if interval is None else interval.mean,
        tau_interval=interval,
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


def _parts(
    engine: ReplayedEngine, reference: ReplayedEngine | None, key: Callable[[ReplayedPrompt], str | None]
) -> list[Part]:
    """By what `key` reads of a prompt, sorted, prompts without it last; [] where no prompt has it."""
    names = {key(prompt) for prompt in engine.prompts}
    if names <= {None}:
        return []

    def taus(of: ReplayedEngine, name: str | None) -> list[float | None]:
        return [prompt.tau for prompt in of.prompts if key(prompt) == name]

    return [
        Part(
            name=name,
            tau=mean_tau(taus(engine, name)),
            reference_tau=None if reference is None else mean_tau(taus(reference, name)),
            tau_loss=None if reference is None else tau_loss(taus(engine, name), taus(reference, name)),
        )
        for name in sorted(names, key=lambda name: (name is None, name or ""))
    ]
