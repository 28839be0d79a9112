# SPDX-License-Identifier: Apache-2.0
"""Bands of a prediction, from the ranges of its constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import get_args

import msgspec

from dflash_trt.deploy.gpus import GpuSpec
from dflash_trt.observe.estimate.constants import End, Rates, constants, rates


class Band(msgspec.Struct, frozen=True):
    """A prediction and its range."""

    value: float
    low: float
    high: float


class Influence(msgspec.Struct, frozen=True):
    """How a prediction changes when one constant goes through its range."""

    constant: str
    at_low: float
    """The prediction with the constant at the low end of its range, over the prediction."""
    at_high: float

    @property
    def spread(self) -> float:
        """The larger of the two changes, as a share."""
        return max(abs(self.at_low - 1), abs(self.at_high - 1))


def vary(gpu: GpuSpec, runtime: str, predict: Callable[[Rates], Sequence[float]]) -> tuple[list[Band], list[Influence]]:
    """Bands of the results of `predict`, and the influences on the first one, strongest first.

    Varies one constant at a time and combines the log-changes as a root sum of squares, as for independent causes.
    """
    nominal = list(predict(rates(gpu, runtime)))
    ups, downs = [0.0] * len(nominal), [0.0] * len(nominal)
    influences = []
    for name, constant in constants().used(runtime).items():
        if constant.low == constant.high:
            continue
        moved = [predict(rates(gpu, runtime, {name: end})) for end in get_args(End)]
        for index, value in enumerate(nominal):
            changes = [math.log(values[index] / value) for values in moved]
            ups[index] += max(0.0, *changes) ** 2
            downs[index] += min(0.0, *changes) ** 2
        influences.append(Influence(name, moved[0][0] / nominal[0], moved[1][0] / nominal[0]))
    bands = [
        Band(value, value * math.exp(-math.sqrt(down)), value * math.exp(math.sqrt(up)))
        for value, up, down in zip(nominal, ups, downs, strict=True)
    ]
    return bands, sorted(influences, key=lambda influence: -influence.spread)
