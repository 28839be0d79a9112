# SPDX-License-Identifier: Apache-2.0
"""Statistics of a comparison of two decoders; pure functions on counts and arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from dflash_trt.api.acceptance import Step

if TYPE_CHECKING:
    import torch

Floats = npt.NDArray[np.float64]
CONFIDENCE = 0.95
RESAMPLES = 10_000
CHUNKS = 20  # so that thousands of prompts need megabytes at a time
SEED = 0
MIN_PROMPTS = 20
"""Fewer prompts make percentile intervals too narrow and dependent on single prompts."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """First position at which two token sequences differ; a token is None where its sequence has ended."""

    position: int
    """Index in the output, from 0."""
    expected: int | None
    found: int | None


class TauLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Relative loss of mean tau against the reference; negative for a gain."""

    loss: float
    """1 - mean(tau) / mean(reference tau)."""
    low: float | None
    """Lower end of the interval; None with a single prompt."""
    high: float | None
    num_prompts: int
    confidence: float = CONFIDENCE
    resamples: int = RESAMPLES
    seed: int = SEED


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over prompts, with the interval as in `TauLoss`."""

    mean: float
    low: float | None
    high: float | None
    num_prompts: int


def first_difference(expected: Sequence[int], actual: Sequence[int]) -> Difference | None:
    """The first place where `actual` is not `expected`, a missing or surplus token included."""
    pairs = enumerate(zip_longest(expected, actual))
    return next((Difference(position=i, expected=a, found=b) for i, (a, b) in pairs if a != b), None)


def mean_tau(taus: Sequence[float | None]) -> Mean | None:
    """The mean over the prompts that have a tau; None without one."""
    values = np.array([[tau for tau in taus if tau is not None]])  # [1, n]
    if not values.size:
        return None
    low, high = _interval(lambda drawn: drawn.mean(axis=-1)[0], values)
    return Mean(mean=float(values.mean()), low=low, high=high, num_prompts=values.size)


def tau_loss(taus: Sequence[float | None], reference: Sequence[float | None]) -> TauLoss | None:
    """The loss over the prompts, in the order of `taus`, that have a tau in both; None without one."""
    pairs = [(a, b) for a, b in zip(taus, reference, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    values = np.array(pairs).T.copy()  # [2, n], each of the two contiguous
    low, high = _interval(_loss, values)
    return TauLoss(loss=float(_loss(values)), low=low, high=high, num_prompts=len(pairs))


def loss_text(loss: TauLoss | None) -> str:
    """'5.61% (3.80% to 7.32%)', with the interval where there is one."""
    if loss is None:
        return "-"
    interval = "" if loss.low is None else f" ({loss.low:.2%} to {loss.high:.2%})"
    return f"{loss.loss:.2%}{interval}"


def _interval(statistic: Callable[[Floats], Floats], values: Floats) -> tuple[float | None, float | None]:
    """The percentile bootstrap interval of a statistic of values [m, ..., n]; None, None for a single prompt.

    Prompts are drawn with replacement, all m values of a prompt together, RESAMPLES times from a fixed seed.
    """
    count = values.shape[1]
    if count == 1:
        return None, None
    generator = np.random.default_rng(SEED)
    drawn = (generator.integers(count, size=(RESAMPLES // CHUNKS, count)) for _ in range(CHUNKS))
    resampled = np.concatenate([statistic(values[:, prompts]) for prompts in drawn])
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(bound) for bound in np.quantile(resampled, [tail, 1 - tail]))
    return low, high


def _loss(values: Floats) -> Floats:
    tau, reference = values.mean(axis=-1)
    return np.asarray(1 - tau / reference)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected|| / ||expected|| over all elements; 0 / 0 is 0, and x / 0 infinite."""
    error = float((actual.double() - expected).norm())
    size = float(expected.double().norm())
    if size == 0:
        return float("inf") if error else 0.0
    return error / size


class PositionAcceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance at one draft position of the block."""

    position: int
    """Position in the block; 1 is the first proposal after the anchor."""
    proposed: int
    """Verify passes that judged a proposal here."""
    accepted: int
    """Verify passes that accepted this proposal, and so all before it."""
    share: float | None
    """accepted / proposed; None when nothing was proposed."""


def acceptance_by_position(steps: Iterable[Step], num_draft_tokens: int) -> list[PositionAcceptance]:
    """Acceptance at positions 1 to K over verify passes.

    A pass that proposed fewer than K tokens (the output's end) says nothing about the positions beyond, nor
    does one that was cut after a stop token: it emitted no bonus token, so nothing there was judged.
    """
    proposed, accepted = [0] * (num_draft_tokens + 1), [0] * (num_draft_tokens + 1)
    for step in steps:
        was_cut = step.accepted == len(step.token_ids)
        for position in range(1, 1 + (step.accepted if was_cut else step.proposed)):
            proposed[position] += 1
            accepted[position] += position <= step.accepted
    return [
        PositionAcceptance(
            position=k,
            proposed=proposed[k],
            accepted=accepted[k],
            share=accepted[k] / proposed[k] if proposed[k] else None,
        )
        for k in range(1, num_draft_tokens + 1)
    ]
