# SPDX-License-Identifier: Apache-2.0
"""The smallest recipe whose loss of tau stays within a budget: by sensitivity first, and replay for the truth.

Smallest in bytes, or in the seconds of a step, as the space counts:

* sensitivity: each group of layers in each algorithm alone, the squared error of the drafter's hidden states. Errors
  of different layers are nearly independent, so their squares add up. Tau of a few prompts is too coarse for this.
* dominated: what costs as much as another algorithm in the same group and errs more is out.
* ladder: from the dense draft, always the change that saves most for the error that it adds.
* truth: the ladder's last rung whose replay loses no more than the budget, by bisection; from there every single
  change that saves something and still stays within.
* held out: of all that passed, the smallest first, until one loses no more than the budget on prompts that none of
  this has seen. The dense draft loses nothing, so there is always one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import msgspec

from dflash_trt.measure.statistics import TauLoss
from dflash_trt.quantize.search.recipe_choice import RecipeChoice, Space

SMALLEST_ERROR = 1e-12
"""Stands in for an error of nothing, so that bytes saved for it can be compared."""


class Judge(Protocol):
    """What measures a choice."""

    def error(self, choice: RecipeChoice) -> float:
        """Squared relative error of the hidden states."""

    def loss(self, choice: RecipeChoice, *, held_out: bool) -> TauLoss | None:
        """Loss of tau against the dense draft; None where no prompt has a verify pass."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that was replayed."""

    choice: RecipeChoice
    cost: float
    """What was to be small: bytes or seconds."""
    loss: TauLoss | None
    held_out: TauLoss | None = None
    """None where it was not asked for."""


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a search came to."""

    best: Trial
    trials: list[Trial]
    """All replays, largest first."""
    errors: dict[RecipeChoice, float]
    """Of the choices with one change."""


def search(space: Space, judge: Judge, max_tau_loss: float) -> SearchResult:
    """The smallest choice within the budget on both splits."""
    errors = {change: judge.error(change) for change in sorted(set(_single(space)), key=lambda c: c.name)}
    space = _without_dominated(space, errors)
    trials: dict[RecipeChoice, Trial] = {}

    def passes(choice: RecipeChoice) -> bool:
        if choice not in trials:
            trials[choice] = Trial(choice=choice, cost=space.cost(choice), loss=judge.loss(choice, held_out=False))
        return _within(trials[choice].loss, max_tau_loss)

    passes(space.dense)
    for family in space.families():
        ladder = _ladder(space, family, errors)
        low, high = 0, len(ladder)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if passes(ladder[middle]) else (low, middle)
        current = ladder[low]
        for change in _changes(space, family, errors):
            candidate = _apply(space, current, change)
            if candidate is not None and passes(candidate):
                current = candidate
    passed = sorted(
        (trial for trial in trials.values() if _within(trial.loss, max_tau_loss)),
        key=lambda trial: (trial.cost, trial.choice.name),
    )
    for trial in passed:
        measured = msgspec.structs.replace(trial, held_out=judge.loss(trial.choice, held_out=True))
        trials[trial.choice] = measured
        if _within(measured.held_out, max_tau_loss):
            break
    listed = sorted(trials.values(), key=lambda trial: (-trial.cost, trial.choice.name))
    return SearchResult(best=measured, trials=listed, errors=errors)


def num_measurements(space: Space) -> int:
    """About how many measurements a search takes, for a progress bar."""
    changes = len(set(_single(space)))
    families = len(space.families())
    return changes + families * (changes.bit_length() + len(space.groups)) + 4


def _within(loss: TauLoss | None, max_tau_loss: float) -> bool:
    return loss is not None and loss.loss <= max_tau_loss


def _without_dominated(space: Space, errors: dict[RecipeChoice, float]) -> Space:
    """The space without algorithms that, in a group, cost no less than another one that errs less."""
    if not space.is_mixed:
        return space  # the better one may not stand beside what the other groups have

    def cost(group: int, algorithm: str) -> tuple[float, float]:
        change = space.dense.with_group(group, algorithm)
        return space.cost(change), errors.get(change, 0.0)

    def is_dominated(group: int, algorithm: str) -> bool:
        size, error = cost(group, algorithm)
        others = [cost(group, other) for other in space.options[group] if other != algorithm]
        return any(s <= size and e < error for s, e in others)

    options = tuple(
        tuple(algorithm for algorithm in algorithms if not is_dominated(group, algorithm))
        for group, algorithms in enumerate(space.options)
    )
    return msgspec.structs.replace(space, options=options)


def _single(space: Space) -> Iterator[RecipeChoice]:
    """The dense draft with one change, for all changes."""
    for family in space.families():
        yield from space.smaller(space.dense, family)


def _ladder(space: Space, family: tuple[str, ...], errors: dict[RecipeChoice, float]) -> list[RecipeChoice]:
    """Choices from the dense draft to the smallest, each one change from the one before it."""
    rungs = [space.dense]
    while candidates := list(space.smaller(rungs[-1], family)):
        rungs.append(max(candidates, key=lambda other: (_worth(space, rungs[-1], other, errors), other.name)))
    return rungs


def _worth(space: Space, choice: RecipeChoice, other: RecipeChoice, errors: dict[RecipeChoice, float]) -> float:
    """What is saved for the error that is added."""
    added = _error(space, other, errors) - _error(space, choice, errors)
    return (space.cost(choice) - space.cost(other)) / max(added, SMALLEST_ERROR)


def _error(space: Space, choice: RecipeChoice, errors: dict[RecipeChoice, float]) -> float:
    """The sum of what each change of `choice` adds alone."""
    alone = [
        space.dense.with_group(group, algorithm)
        for group, algorithm in enumerate(choice.algorithms)
        if algorithm != space.dense.algorithms[group]
    ]
    if choice.fp8_context:
        alone.append(msgspec.structs.replace(space.dense, fp8_context=True))
    return sum(errors[change] for change in alone)


def _changes(space: Space, family: tuple[str, ...], errors: dict[RecipeChoice, float]) -> list[RecipeChoice]:
    """All single changes of a family, those worth most first."""
    return sorted(space.smaller(space.dense, family), key=lambda c: (-_worth(space, space.dense, c, errors), c.name))


def _apply(space: Space, choice: RecipeChoice, change: RecipeChoice) -> RecipeChoice | None:
    """`choice` with the one change that `change` has; None where that saves nothing."""
    changed = msgspec.structs.replace(choice, fp8_context=choice.fp8_context or change.fp8_context)
    for group, algorithm in enumerate(change.algorithms):
        if algorithm != space.dense.algorithms[group]:
            changed = changed.with_group(group, algorithm)
    return changed if space.cost(changed) < space.cost(choice) else None
