# SPDX-License-Identifier: Apache-2.0
"""Latencies by percentile, and goodput: requests that meet all objectives (SLOs), with AIPerf's names and rule.

A request without a figure that an objective asks for, as a single token has no inter-token latency, does not meet it
(AIPerf 0.13.0, metrics/types/good_request_count_metric.py). What was lost meets none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dflash_trt.errors import ConfigError, shown
from dflash_trt.observe.bench.records import BenchPoint, Distribution, RequestRow

TTFT, ITL, LATENCY = "time_to_first_token", "inter_token_latency", "request_latency"
USER_RATE = "output_token_throughput_per_user"
METRICS = (TTFT, ITL, LATENCY, USER_RATE)
"""Tags of AIPerf: three in ms, of which less is better, and tokens/s."""
Objectives = Mapping[str, float]


class Goodput(msgspec.Struct, frozen=True):
    """How many requests of a point met all objectives."""

    good: int
    sent: int
    per_second: float
    """Good requests a second of the measured interval."""


def parse_objectives(text: str) -> dict[str, float]:
    """`time_to_first_token:200 inter_token_latency:20`, as AIPerf's --goodput; raises ConfigError for anything else."""
    objectives: dict[str, float] = {}
    for word in text.split():
        name, _, value = word.partition(":")
        if name not in METRICS or name in objectives:
            raise ConfigError(f"--goodput: expected each of {', '.join(METRICS)} at most once, found {shown(name)}")
        try:
            objectives[name] = float(value)
        except ValueError:
            objectives[name] = 0
        if not 0 < objectives[name] < float("inf"):
            raise ConfigError(f"--goodput: {name}: expected a number above 0, found {shown(value)}")
    if not objectives:
        raise ConfigError("--goodput: expected objectives as in time_to_first_token:200, found none")
    return objectives


def in_words(objectives: Objectives) -> str:
    """time_to_first_token <= 200 ms."""
    return " and ".join(
        f"{name} >= {value:g} tokens/s" if name == USER_RATE else f"{name} <= {value:g} ms"
        for name, value in objectives.items()
    )


def figure(row: RequestRow, metric: str) -> float | None:
    """A metric of one request in AIPerf's unit."""
    if metric == LATENCY:
        return row.seconds * 1e3
    if row.ttft_seconds is None:
        return None
    if metric == TTFT:
        return row.ttft_seconds * 1e3
    decoding, tokens = row.seconds - row.ttft_seconds, row.output_tokens - 1
    if tokens < 1:
        return None
    if metric == ITL:
        return decoding / tokens * 1e3
    return tokens / decoding if decoding > 0 else None


def is_good(row: RequestRow, objectives: Objectives) -> bool:
    """Whether a request meets them all."""
    found = {name: figure(row, name) for name in objectives}
    return all(
        value is not None and (value >= objectives[name] if name == USER_RATE else value <= objectives[name])
        for name, value in found.items()
    )


def goodput(point: BenchPoint, objectives: Objectives) -> Goodput:
    good = sum(is_good(row, objectives) for row in point.rows)
    return Goodput(good, point.requests.sent, good / point.seconds if point.seconds else 0.0)


def latencies(point: BenchPoint) -> Sequence[tuple[str, Distribution]]:
    """The latencies that were measured, in seconds, each with its title."""
    found = (
        ("Time to first token", point.ttft_seconds),
        ("Inter-token latency", point.itl_seconds),
        ("Request latency", point.request_seconds),
    )
    return [(title, distribution) for title, distribution in found if distribution is not None]
