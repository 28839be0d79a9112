# SPDX-License-Identifier: Apache-2.0
"""Measures recipes on captured answers, and remembers what it measured: a search that was stopped goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain

import msgspec
import numpy as np
import torch

from dflash_trt.engine.executor import DraftInputs
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.bounds import CAPTURE
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.measure.calibrate import choose_anchors
from dflash_trt.runtime.measure.features import FeatureFile
from dflash_trt.runtime.measure.journal import Journal
from dflash_trt.runtime.measure.replay import RecordedTarget, Replayed, replay
from dflash_trt.runtime.measure.search.search import RecipeChoice
from dflash_trt.runtime.measure.statistics import TauLoss, tau_loss
from dflash_trt.runtime.measure.verification_verdict import unmeasured

OpenChoice = Callable[[RecipeChoice], AbstractContextManager[Drafter]]


class SearchSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences of a feature file."""

    features: FeatureFile
    numbers: tuple[int, ...]


def split(features: FeatureFile, held_out: FeatureFile | None, seed: int) -> tuple[SearchSplit, SearchSplit]:
    """To search on, and to hold out: both files, or two halves of the first one's prompts, drawn with `seed`.

    Raises CheckpointError where a prompt would be in both, or none in one of them.
    """
    answers = _answers(features, 2 if held_out is None else 1)
    if held_out is None:
        prompts = np.random.default_rng(seed).permutation(len(answers)).tolist()
        numbers, middle = list(answers.values()), (len(prompts) + 1) // 2
        first, second = ([numbers[i] for i in part] for part in (prompts[:middle], prompts[middle:]))
        return _split(features, first), _split(features, second)
    others = _answers(held_out, 1)
    if shared := answers.keys() & others.keys():
        raise CheckpointError(
            f"--held-out {held_out.file}: expected prompts that are not in --features, found {len(shared)} of"
            f" {len(others)} there",
            hint=f"leave --held-out out to hold half of --features out, or capture other prompts: {CAPTURE}",
        )
    return _split(features, answers.values()), _split(held_out, others.values())


def _answers(features: FeatureFile, needed: int) -> dict[tuple[int, ...], list[int]]:
    """Numbers of the sequences with a verify pass by prompt, which may have several; CheckpointError below `needed`."""
    answers: dict[tuple[int, ...], list[int]] = {}
    for number, prompt in features.answered_prompts().items():
        answers.setdefault(prompt, []).append(number)
    if len(answers) < needed:
        other = "give others as --held-out FILE, or " if needed > 1 else ""
        raise CheckpointError(
            f"{features.file}: expected {needed} or more prompts with answers of at least 2 tokens, found"
            f" {len(answers)}",
            hint=f"{other}capture more: {CAPTURE}",
        )
    return answers


def _split(features: FeatureFile, numbers: Iterable[list[int]]) -> SearchSplit:
    return SearchSplit(features=features, numbers=tuple(sorted(chain.from_iterable(numbers))))


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of a journal: what was measured of which choice."""

    key: str
    error: float | None = None
    loss: TauLoss | None = None


class RecipeJudge:
    """A `Judge` that replays: each measurement quantises the draft, builds its graphs and runs them."""

    def __init__(
        self,
        open_choice: OpenChoice,
        dense: RecipeChoice,
        splits: tuple[SearchSplit, SearchSplit],
        journal: Journal[Measurement],
        on_measured: Callable[[], None] = lambda: None,
    ) -> None:
        """`dense` is what losses and errors are against; `splits` to search on and to hold out."""
        self._open = open_choice
        self._dense = dense
        self._splits = splits
        self._journal = journal
        self._on_measured = on_measured
        self._references: dict[bool, list[Replayed]] = {}
        self._reference_hidden: list[torch.Tensor] = []

    def error(self, choice: RecipeChoice) -> float:
        """Mean over sequences of |a - b|^2 / |b|^2 of the proposing rows, b the dense draft's hidden states."""

        def measure() -> Measurement:
            if not self._reference_hidden:
                with self._open(self._dense) as drafter:
                    self._reference_hidden = list(_hidden(drafter, self._splits[0]))
            with self._open(choice) as drafter:
                pairs = zip(_hidden(drafter, self._splits[0]), self._reference_hidden, strict=True)
                errors = [float((a - b).norm() ** 2 / b.norm() ** 2) for a, b in pairs]
            return Measurement(key=f"error {choice.name}", error=float(np.mean(errors)))

        error = self._measure(f"error {choice.name}", measure).error
        assert error is not None
        return error

    def loss(self, choice: RecipeChoice, *, held_out: bool) -> TauLoss:
        """Loss of tau on one of the splits; VerificationError where no verify pass had a draft."""
        key = f"{'held out' if held_out else 'search'} {choice.name}"

        def measure() -> Measurement:
            if held_out not in self._references:
                self._references[held_out] = self._replay(self._dense, held_out)
            replays = self._references[held_out] if choice == self._dense else self._replay(choice, held_out)
            taus, expected = ([replayed.tau for replayed in r] for r in (replays, self._references[held_out]))
            return Measurement(key=key, loss=tau_loss(taus, expected))

        if (loss := self._measure(key, measure).loss) is None:
            raise unmeasured()
        return loss

    def _measure(self, key: str, measure: Callable[[], Measurement]) -> Measurement:
        entry = self._journal.measure(key, measure)
        self._on_measured()
        return entry

    def _replay(self, choice: RecipeChoice, held_out: bool) -> list[Replayed]:
        split = self._splits[held_out]
        with self._open(choice) as drafter:
            return replay(split.features, drafter, numbers=split.numbers)


@torch.inference_mode()
def _hidden(drafter: Drafter, split: SearchSplit) -> Iterator[torch.Tensor]:
    """Yields hidden [anchors, K, H] of the proposing rows, for each sequence that has anchors."""
    target, S = RecordedTarget(split.features, (), drafter.executor.device), drafter.spec.block_size
    for number in split.numbers:
        sequence = split.features.sequence(number)
        anchors = torch.from_numpy(choose_anchors(sequence, number))
        if not len(anchors):
            continue
        drafter.inject([0], [len(sequence.taps)], sequence.taps.float())
        noise = drafter.embedding.blocks(sequence.tokens[anchors], target.embed)
        positions = anchors[:, None] + torch.arange(S)
        page_ids = torch.tensor(drafter.cache.page_ids([0] * len(anchors), len(sequence.taps)))
        hidden = drafter.executor.draft(DraftInputs(noise, positions, page_ids, anchors))["hidden"].to(noise.dtype)
        drafter.release(0)
        yield hidden[:, drafter.spec.first_proposing_row :].clone()
