# SPDX-License-Identifier: Apache-2.0
"""What a comparison of two decoders comes to; pure functions on counts and arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

CONFIDENCE = 0.95
RESAMPLES = 10_000
SEED = 0
MIN_PROMPTS = 20
"""Below it percentile intervals are known to be too narrow, and they hang on single prompts."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where two token sequences part; a token is None where its sequence has ended."""

    position: int
    """Index in the output, from 0."""
    expected: int | None
    found: int | None


class TauLoss(msgspec.Struct, frozen=True, kw_only=True):
    """By how much mean tau falls short of the reference's; negative when it is higher."""

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
    """A mean over prompts."""

    mean: float
    low: float | None
    """Lower end of the interval; None with a single prompt."""
    high: float | None
    num_prompts: int


def first_difference(expected: Sequence[int], found: Sequence[int]) -> Difference | None:
    """The first place where `found` is not `expected`, a missing or surplus token included."""
    for position in range(max(len(expected), len(found))):
        pair = [tokens[position] if position < len(tokens) else None for tokens in (expected, found)]
        if pair[0] != pair[1]:
            return Difference(position=position, expected=pair[0], found=pair[1])
    return None


def tau_loss(taus: Sequence[float], reference_taus: Sequence[float]) -> TauLoss | None:
    """The loss over paired prompts [n] with its percentile bootstrap interval; None without a prompt.

    Prompts are drawn with replacement, both taus of a prompt together, RESAMPLES times from a fixed seed.
    """
    pairs = np.array([taus, reference_taus], dtype=np.float64)  # [2, n]
    if pairs.shape[1] == 0:
        return None
    low, high = _interval(_loss, pairs)
    return TauLoss(loss=_loss(pairs), low=low, high=high, num_prompts=pairs.shape[1])


def mean_tau(taus: Sequence[float]) -> Mean | None:
    """The mean over prompts [n] with its percentile bootstrap interval, as `tau_loss`; None without a prompt."""
    values = np.array([taus], dtype=np.float64)  # [1, n]
    if values.size == 0:
        return None
    low, high = _interval(_mean, values)
    return Mean(mean=_mean(values), low=low, high=high, num_prompts=values.size)


def pooled_mean(sums: Sequence[float], counts: Sequence[float]) -> Mean | None:
    """sum / count over all prompts [n] together, with its interval over prompts; None without a prompt."""
    values = np.array([sums, counts], dtype=np.float64)  # [2, n]
    if values.shape[1] == 0:
        return None
    low, high = _interval(_pooled, values)
    return Mean(mean=_pooled(values), low=low, high=high, num_prompts=values.shape[1])


def pooled_loss(
    pooled: tuple[Sequence[float], Sequence[float]], reference: tuple[Sequence[float], Sequence[float]]
) -> TauLoss:
    """1 - pooled mean / the reference's, of sums and counts of the same prompts [n], n > 0, with its interval."""
    values = np.array([*pooled, *reference], dtype=np.float64)  # [4, n]
    low, high = _interval(_pooled_loss, values)
    return TauLoss(loss=_pooled_loss(values), low=low, high=high, num_prompts=values.shape[1])


def _interval(
    statistic: Callable[[npt.NDArray[np.float64]], float], values: npt.NDArray[np.float64]
) -> tuple[float | None, float | None]:
    """Ends of the interval of a statistic of values [m, n] over n prompts; None, None for a single one."""
    count = values.shape[1]
    if count == 1:
        return None, None
    generator = np.random.default_rng(SEED)
    resampled = [statistic(values[:, generator.integers(count, size=count)]) for _ in range(RESAMPLES)]
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(bound) for bound in np.quantile(resampled, [tail, 1 - tail]))
    return low, high


def _mean(values: npt.NDArray[np.float64]) -> float:
    return float(values.mean())


def _pooled(values: npt.NDArray[np.float64]) -> float:
    total, count = values.sum(axis=1)
    return float(total / count)


def _pooled_loss(values: npt.NDArray[np.float64]) -> float:
    return 1 - _pooled(values[:2]) / _pooled(values[2:])


def _loss(pairs: npt.NDArray[np.float64]) -> float:
    mean, reference_mean = pairs.mean(axis=1)
    return float(1 - mean / reference_mean)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected|| over all elements; 0 / 0 is 0, and x / 0 infinite."""
    error = float((actual.double() - expected).norm())
    size = float(expected.double().norm())
    if size == 0:
        return float("inf") if error else 0.0
    return error / size
