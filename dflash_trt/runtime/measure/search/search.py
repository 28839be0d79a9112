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

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.number_formats import ACTIVATION_ALGORITHMS, FORMATS
from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.quantize.convert import checkpoint_bytes
from dflash_trt.quantize.loadable import Loadable
from dflash_trt.quantize.scales import scale_groups
from dflash_trt.runtime.measure.statistics import TauLoss

SMALLEST_ERROR = 1e-12
"""Stands in for an error of nothing, so that bytes saved for it can be compared."""


class Judge(Protocol):
    """Measures choices."""

    def error(self, choice: RecipeChoice) -> float:
        """Squared relative error of the hidden states."""

    def loss(self, choice: RecipeChoice, *, held_out: bool) -> TauLoss:
        """Loss of tau against the dense draft; VerificationError where no verify pass had a draft."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A choice that was replayed."""

    choice: RecipeChoice
    cost: float
    """Bytes or seconds, which the search minimises."""
    loss: TauLoss
    held_out: TauLoss | None = None
    """Loss on held-out prompts; None where it was not measured."""


class SearchResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a search."""

    best: Trial
    trials: list[Trial]
    """All replays, largest first."""
    errors: dict[RecipeChoice, float]
    """Errors of the choices with one change."""


def search(space: Space, judge: Judge, max_tau_loss: float) -> SearchResult:
    """The smallest choice within the budget on both splits."""
    errors = {change: judge.error(change) for change in sorted(_single(space), key=lambda c: c.name)}
    space = _without_dominated(space, errors)
    trials: dict[RecipeChoice, Trial] = {}

    def passes(choice: RecipeChoice) -> bool:
        if choice not in trials:
            trials[choice] = Trial(choice=choice, cost=space.cost(choice), loss=judge.loss(choice, held_out=False))
        return trials[choice].loss.loss <= max_tau_loss

    def worth(choice: RecipeChoice, smaller: RecipeChoice) -> tuple[float, str]:
        """Cost saved per error added; names break ties."""
        before, after = (sum(errors[change] for change in of.changes()) for of in (choice, smaller))
        saved = space.cost(choice) - space.cost(smaller)
        return saved / max(after - before, SMALLEST_ERROR), smaller.name

    passes(space.dense)
    for family in space.families():
        ladder = _ladder(space, family, worth)
        low, high = 0, len(ladder)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if passes(ladder[middle]) else (low, middle)
        current = ladder[low]
        changes = [(-worth(space.dense, c)[0], c.name, c) for c in space.smaller(space.dense, family)]
        for _, _, change in sorted(changes, key=lambda ranked: ranked[:2]):
            candidate = current.changed(change)
            if space.cost(candidate) < space.cost(current) and passes(candidate):
                current = candidate
    passed = sorted(
        (trial for trial in trials.values() if trial.loss.loss <= max_tau_loss),
        key=lambda trial: (trial.cost, trial.choice.name),
    )
    for trial in passed:
        loss = judge.loss(trial.choice, held_out=True)
        trials[trial.choice] = measured = msgspec.structs.replace(trial, held_out=loss)
        if loss.loss <= max_tau_loss:
            break
    listed = sorted(trials.values(), key=lambda trial: (-trial.cost, trial.choice.name))
    return SearchResult(best=measured, trials=listed, errors=errors)


def num_measurements(space: Space) -> int:
    """About how many measurements a search takes, for a progress bar."""
    changes = len(_single(space))
    return changes + len(space.families()) * (changes.bit_length() + len(space.groups)) + 4


def _without_dominated(space: Space, errors: dict[RecipeChoice, float]) -> Space:
    """The space without algorithms that, in a group, cost no less than another one that errs less."""
    if not space.is_mixed:
        return space  # the better one may not stand beside what the other groups have

    def cost(group: int, algorithm: str) -> tuple[float, float]:
        change = space.dense.with_group(group, algorithm)
        return space.cost(change), errors.get(change, 0.0)

    def is_dominated(group: int, algorithm: str) -> bool:
        size, error = cost(group, algorithm)
        rivals = [cost(group, rival) for rival in space.options[group] if rival != algorithm]
        return any(s <= size and e < error for s, e in rivals)

    options = tuple(
        tuple(algorithm for algorithm in algorithms if not is_dominated(group, algorithm))
        for group, algorithms in enumerate(space.options)
    )
    return msgspec.structs.replace(space, options=options)


def _single(space: Space) -> set[RecipeChoice]:
    """The dense draft with one change, for all changes."""
    return {change for family in space.families() for change in space.smaller(space.dense, family)}


def _ladder(
    space: Space, family: tuple[str, ...], worth: Callable[[RecipeChoice, RecipeChoice], tuple[float, str]]
) -> list[RecipeChoice]:
    """Choices from the dense draft to the smallest, each one change from the one before it."""
    rungs = [space.dense]
    while candidates := list(space.smaller(rungs[-1], family)):
        rungs.append(max(candidates, key=lambda candidate: worth(rungs[-1], candidate)))
    return rungs


DENSE = "none"
Price = Callable[[Mapping[str, str], bool], float]
"""Seconds of a drafter's pass, by the algorithms of its quantised modules and whether its context is FP8."""


class RecipeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One recipe."""

    algorithms: tuple[str, ...]
    """Algorithm by group; `none` for a dense one."""
    fp8_context: bool = False

    @property
    def name(self) -> str:
        """'none FP8 NVFP4 +fp8-kv': the same for the same choice."""
        return " ".join([*self.algorithms, *(["+fp8-kv"] if self.fp8_context else [])])

    def with_group(self, group: int, algorithm: str) -> RecipeChoice:
        """The choice with another algorithm in one group."""
        changed = (*self.algorithms[:group], algorithm, *self.algorithms[group + 1 :])
        return msgspec.structs.replace(self, algorithms=changed)

    def changes(self) -> Iterator[RecipeChoice]:
        """The choices of one change each that add up to this one."""
        dense = RecipeChoice(algorithms=(DENSE,) * len(self.algorithms))
        for group, algorithm in enumerate(self.algorithms):
            if algorithm != DENSE:
                yield dense.with_group(group, algorithm)
        if self.fp8_context:
            yield msgspec.structs.replace(dense, fp8_context=True)

    def changed(self, change: RecipeChoice) -> RecipeChoice:
        """This choice with what `change` has that is not dense."""
        pairs = zip(self.algorithms, change.algorithms, strict=True)
        algorithms = tuple(old if new == DENSE else new for old, new in pairs)
        return RecipeChoice(algorithms=algorithms, fp8_context=self.fp8_context or change.fp8_context)


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """All choices for one draft."""

    draft: DraftCheckpoint
    groups: tuple[tuple[str, ...], ...]
    """Modules that share a GEMM, and so an algorithm."""
    options: tuple[tuple[str, ...], ...]
    """Algorithms that each group may have besides `none`."""
    is_mixed: bool
    """Whether groups may differ in algorithm, `none` aside."""
    context_tokens: int
    """Tokens whose context cache counts as bytes; with 0 it stays as it is."""
    has_fp8_context: bool
    price: Price | None = None
    """Seconds of a choice, where they are to be few; None: bytes are."""

    @property
    def dense(self) -> RecipeChoice:
        """The unquantised draft."""
        return RecipeChoice(algorithms=(DENSE,) * len(self.groups))

    def modules(self, choice: RecipeChoice) -> dict[str, str]:
        """Algorithm by quantised module."""
        named = zip(self.groups, choice.algorithms, strict=True)
        return {module: algorithm for group, algorithm in named if algorithm != DENSE for module in group}

    def checkpoint_bytes(self, choice: RecipeChoice) -> int:
        """Bytes of the tensors that `quantize` writes."""
        return checkpoint_bytes(self.draft, Quantization(modules=self.modules(choice), fp8_kv_cache=choice.fp8_context))

    def cost(self, choice: RecipeChoice) -> float:
        """Cost that a search minimises: `bytes`, or seconds at the space's price."""
        return self.bytes(choice) if self.price is None else self.price(self.modules(choice), choice.fp8_context)

    def bytes(self, choice: RecipeChoice) -> int:
        """The checkpoint, and the context cache of `context_tokens`, BF16 or FP8."""
        per_token = self.draft.spec.context_bytes_per_token(fp8=choice.fp8_context)
        return self.checkpoint_bytes(choice) + self.context_tokens * per_token

    def smaller(self, choice: RecipeChoice, algorithms: Sequence[str]) -> Iterator[RecipeChoice]:
        """Choices that differ in one thing, with an algorithm out of `algorithms`, and cost less."""
        candidates = [
            choice.with_group(group, algorithm)
            for group, options in enumerate(self.options)
            for algorithm in options
            if algorithm in algorithms and algorithm != choice.algorithms[group]
        ]
        if self.has_fp8_context and not choice.fp8_context:
            candidates.append(msgspec.structs.replace(choice, fp8_context=True))
        cost = self.cost(choice)
        yield from (candidate for candidate in candidates if self.cost(candidate) < cost)

    def families(self) -> list[tuple[str, ...]]:
        """The algorithms that may stand side by side: all, or each alone."""
        used = sorted({algorithm for options in self.options for algorithm in options})
        return [tuple(used)] if self.is_mixed else [(algorithm,) for algorithm in used]


def make_space(
    draft: DraftCheckpoint,
    loadable: Loadable,
    *,
    formats: Sequence[str],
    ranged: frozenset[str] | None = None,
    context_tokens: int = 0,
    price: Price | None = None,
) -> Space:
    """Choices that a runtime loads; `ranged` are the modules whose input's range is known, None: all."""
    groups = tuple(scale_groups(draft.spec))

    def allows(module: str, algorithm: str) -> bool:
        suits = draft.weights[f"{module}.weight"].shape[1] % (FORMATS[algorithm].block or 1) == 0
        has_range = ranged is None or module in ranged or algorithm not in ACTIVATION_ALGORITHMS
        return suits and has_range and loadable.allows(module, algorithm)

    return Space(
        draft=draft,
        groups=groups,
        options=tuple(tuple(a for a in formats if all(allows(module, a) for module in group)) for group in groups),
        is_mixed=loadable.is_mixed,
        context_tokens=context_tokens,
        has_fp8_context=loadable.has_fp8_context and context_tokens > 0,
        price=price,
    )
