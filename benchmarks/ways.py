# SPDX-License-Identifier: Apache-2.0
"""Ways to decode the same prompts, measured in turn in one process; seconds of single calls, and of a copy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

RUNS, ENOUGH_SECONDS = 50, 2.0
"""Calls to measure, or as many as take so long."""
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
COLUMNS = ("decoding", "batch", "tokens", "steps", "tau", "tokens/s", "ratio to its plain")


class Answers(NamedTuple):
    """Tokens and times that a way has decoded."""

    outputs: list[list[int]]
    steps: int
    """Verify passes, counted for each request."""
    passes: int = 0
    """Forward calls of the target, prompts included; 0 if they are not counted."""


@dataclass
class Way:
    """One way to decode all prompts."""

    name: str
    batch: int
    run: Callable[[], Answers] | None
    """None for what has been measured elsewhere."""
    plain: Way | None = None
    """The way that its ratio refers to."""
    host_milliseconds: float | None = None
    seconds: list[float] = field(default_factory=list)
    answers: Answers = field(default_factory=lambda: Answers([], 0))

    def round(self) -> None:
        """Decodes once more."""
        assert self.run is not None
        begin = time.perf_counter()
        self.answers = self.run()
        self.seconds.append(time.perf_counter() - begin)

    @property
    def outputs(self) -> list[list[int]]:
        """Token ids of each prompt, of the last round."""
        return self.answers.outputs

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of a table with COLUMNS."""
        count = sum(map(len, self.outputs))
        tau = (count - len(self.outputs)) / self.answers.steps
        ratio = f"{self.plain.median / self.median:.2f}x" if self.plain else ""
        speed = f"{count / self.median:.3g}" if count < 100 * self.median else f"{count / self.median:.0f}"
        return self.name, str(self.batch), str(count), str(self.answers.steps), f"{tau:.2f}", speed, ratio


def measure(ways: Sequence[Way], rounds: int) -> None:
    """Runs all ways in turn, `rounds` times after a warm-up, which a round before this was, too."""
    for way in ways:
        if not way.seconds:
            way.round()
        way.seconds.clear()
    for _ in range(rounds):
        for way in ways:
            way.round()


def seconds_of(call: Callable[[], object]) -> float:
    """Mean time of a call after a first one; what it leaves to a GPU included."""
    call()
    begin, count = _now(), 0
    while count < RUNS and time.perf_counter() - begin < ENOUGH_SECONDS:
        call()
        count += 1
    return (_now() - begin) / count


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def copy_rate(device: str) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    source, place = (torch.zeros(COPY_BYTES[device], dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * len(source) / seconds_of(lambda: place.copy_(source))
