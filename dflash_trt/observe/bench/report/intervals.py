# SPDX-License-Identifier: Apache-2.0
"""Speed-ups with 95 % intervals, from resampled requests.

Completed requests are resampled with replacement NUM_SAMPLES times, and each figure is computed from every sample. The
interval covers the spread between prompts, not between runs, machines or days.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dflash_trt.observe.bench.point_record import BenchPoint, RequestRow

NUM_SAMPLES = 1000
ENDS = (2.5, 97.5)
Samples = NDArray[np.float64]


class Speedup(msgspec.Struct, frozen=True):
    """A method's rate over the reference's, and its interval, if every sample gave a figure."""

    value: float
    interval: tuple[float, float] | None
    limit: float | None = None
    """Acceptance length, which bounds a speed-up over plain decoding at the same concurrency; None without a bound."""

    @property
    def is_possible(self) -> bool:
        """Whether the figure can be true; otherwise the machine had other work while one of both was measured."""
        return self.limit is None or self.value <= self.limit


def speedups(
    reference: str, rates: Mapping[str, float | None], samples: Mapping[str, Samples],
    limits: Mapping[str, float | None] | None = None,
) -> dict[str, Speedup]:  # fmt: skip
    """Speed-up of each method over `reference`, where both have a rate; none can be above its limit."""
    base = rates.get(reference)
    return {
        name: _speedup(rate / base, interval(samples[name] / samples[reference]), (limits or {}).get(name))
        for name, rate in rates.items() if name != reference and rate is not None and base
    }  # fmt: skip


def _speedup(value: float, ends: tuple[float, float] | None, limit: float | None) -> Speedup:
    """The interval ends at the limit, too, unless the value itself is above it."""
    if ends is not None and limit is not None and value <= limit:
        ends = ends[0], min(ends[1], limit)
    return Speedup(value, ends, limit)


def interval(values: Samples) -> tuple[float, float] | None:
    """The middle 95 % of `values` [NUM_SAMPLES]; None where some sample gave no figure."""
    if not np.isfinite(values).all():
        return None
    low, high = np.percentile(values, ENDS)
    return float(low), float(high)


def request_rate(rows: Sequence[RequestRow]) -> float | None:
    """Tokens a second of one request, from sending it to its last token: sum of tokens / sum of seconds."""
    seconds = sum(row.seconds for row in rows)
    return sum(row.output_tokens for row in rows) / seconds if seconds else None


def request_rates(rows: Sequence[RequestRow], seed: int, name: str) -> Samples:
    """`request_rate` of each sample; `name` keeps the samples of different rows independent."""
    indices = _resample(len(rows), seed, name)
    tokens = np.array([row.output_tokens for row in rows], dtype=float)
    seconds = np.array([row.seconds for row in rows])
    return _divide(tokens[indices].sum(axis=1), seconds[indices].sum(axis=1))


def point_rates(point: BenchPoint, seed: int, name: str) -> tuple[Samples, Samples]:
    """(speed of a user, throughput) of each sample: AIPerf's figures of the point, scaled as the requests' change."""
    tokens = np.array([row.output_tokens for row in point.rows], dtype=float)
    seconds = np.array([row.seconds for row in point.rows])
    whole = request_rates(point.rows, seed, name) / _divide(tokens.sum(), seconds.sum())
    waits = np.array([np.nan if row.ttft_seconds is None else row.ttft_seconds for row in point.rows])
    user = np.where(tokens > 1, _divide(tokens - 1, seconds - waits), np.nan)
    measured = user[np.isfinite(user)]
    if point.user_rate is None or not len(measured):
        return np.full(NUM_SAMPLES, np.nan), point.output_tokens_per_second * whole
    medians = np.median(measured[_resample(len(measured), seed, name)], axis=1)
    return point.user_rate * medians / np.median(measured), point.output_tokens_per_second * whole


def _resample(count: int, seed: int, name: str) -> NDArray[np.int64]:
    """Indices [NUM_SAMPLES, count] of resampled rows; the same for the same seed and name."""
    generator = np.random.default_rng((abs(seed), zlib.crc32(name.encode())))
    return generator.integers(count, size=(NUM_SAMPLES, count))


def _divide(above: Samples | np.float64, below: Samples | np.float64) -> Samples:
    """NaN where `below` is not above 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(below) > 0, np.divide(above, below), np.nan)
