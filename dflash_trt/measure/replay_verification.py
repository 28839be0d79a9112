# SPDX-License-Identifier: Apache-2.0
"""`verify --features`: acceptance on captured answers, without the target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from dflash_trt.drafter.open import open_drafter
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.measure.comparable import check_features, check_reference
from dflash_trt.measure.replay import BATCH_SIZE, Replayed, replay
from dflash_trt.measure.replay_report import ReplayReport, expected_report, replay_report
from dflash_trt.quantize.features import open_features

Progress = Callable[[int, str], AbstractContextManager[Callable[[], None]]]
"""From the number of prompts and a label: what is called after each."""


def verify_features(
    engine: Path, features: Path, reference: Path | None, temperature: float | None, progress: Progress
) -> ReplayReport:
    """Replays the captured answers with the engine and its reference.

    With a `temperature` it also says what sampling is expected to accept.
    """
    manifest, other = read_manifest(engine), None if reference is None else read_manifest(reference)
    if other is not None:
        check_reference(manifest, other, str(reference))
    with open_features(features, manifest.draft) as file:
        check_features(manifest, file.facts, str(features), str(engine))
        if temperature is not None:
            file.check_logprobs(temperature)

        def replays_of(directory: Path, its_manifest: Manifest) -> list[Replayed]:
            return replay(file, open_drafter(directory, its_manifest, num_slots=BATCH_SIZE), on_prompt=advance)

        with progress(file.facts.num_sequences * (1 if other is None else 2), "prompts") as advance:
            replays = replays_of(engine, manifest)
            baseline = None if other is None or reference is None else (other, replays_of(reference, other))
        expected = None
        if temperature is not None:
            num_drafts, others = manifest.draft.num_draft_tokens, None if baseline is None else baseline[1]
            expected = expected_report(file, temperature, num_drafts, replays, others)
        return replay_report(file.facts, manifest, replays, baseline, expected)
