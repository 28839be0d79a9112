# SPDX-License-Identifier: Apache-2.0
"""Measured speeds by batch and draft length, in place of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dflash_trt.errors import ConfigError, shown
from dflash_trt.files.json_file import read_json

SCHEMA = "dflash-trt/points/1"


class MeasuredPoint(msgspec.Struct, frozen=True):
    """One measurement."""

    batch: int
    draft_tokens: int
    user_rate: float
    """Tokens a second of one user."""


class PredictedPoint(msgspec.Struct, frozen=True):
    """A measurement, and the model's speed of a user there."""

    measured: MeasuredPoint
    predicted_rate: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted_rate / self.measured.user_rate - 1


class MeasuredPoints(msgspec.Struct, frozen=True):
    """The document `dflash-trt/points/1`, which benchmarks/bench_estimate.py writes."""

    schema: str
    points: tuple[MeasuredPoint, ...]

    def user_rate(self, batch: int, draft_tokens: int) -> float | None:
        """The measured speed at that batch, or on the line between the two measured around it; None outside."""
        speeds = {point.batch: point.user_rate for point in self.points if point.draft_tokens == draft_tokens}
        below, above = (max((b for b in speeds if b <= batch), default=None),
                        min((b for b in speeds if b >= batch), default=None))  # fmt: skip
        if below is None or above is None:
            return None
        if below == above:
            return speeds[below]
        share = (batch - below) / (above - below)
        # Steps grow with the batch in straight lines, more nearly than speeds fall.
        return 1 / ((1 - share) / speeds[below] + share / speeds[above])

    def beside(self, model: Callable[[int, int], float]) -> tuple[PredictedPoint, ...]:
        """Every point with what the model says of it."""
        return tuple(PredictedPoint(point, model(point.batch, point.draft_tokens)) for point in self.points)


def read_points(file: Path) -> MeasuredPoints:
    """Raises ConfigError for another document, and for one without points."""
    document = read_json(file, MeasuredPoints, ConfigError, what="a document dflash-trt/points/1")
    if document.schema != SCHEMA or not document.points:
        raise ConfigError(f"{file}: expected points of dflash-trt/points/1, found {len(document.points)} of "
                          f"{shown(document.schema)}")  # fmt: skip
    if any(point.batch < 1 or point.draft_tokens < 0 or point.user_rate <= 0 for point in document.points):
        raise ConfigError(f"{file}: expected batches, draft lengths and speeds above 0, found others")
    return document
