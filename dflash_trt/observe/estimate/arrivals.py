# SPDX-License-Identifier: Apache-2.0
"""The requests of a load: a Poisson process, or a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import json_value
from dflash_trt.files.read import read_bytes

MAX_BYTES = 2**28  # a million requests and more


class Arrival(msgspec.Struct, frozen=True):
    """One request."""

    seconds: float
    """After the start."""
    prompt_tokens: int
    output_tokens: int


def poisson(rate: float, seconds: float, prompt_tokens: int, output_tokens: int, seed: int = 0) -> list[Arrival]:
    """Requests of one length that come independently of each other, `rate` a second."""
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / rate, size=int(rate * seconds * 2) + 100))
    return [Arrival(float(at), prompt_tokens, output_tokens) for at in times[times < seconds]]


class _TraceLine(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=1)]


def read_trace(file: Path) -> list[Arrival]:
    """A trace in Mooncake's format: one JSON object a line with timestamp in ms, input_length and output_length.

    Raises ConfigError, naming the line, for anything else, and for a trace without requests.
    """
    if not file.exists():
        raise ConfigError(f"{file}: expected a trace, or poisson:RATE, found no such file")
    what = '{"timestamp": ms, "input_length": n, "output_length": n}'
    arrivals = []
    for number, line in enumerate(read_bytes(file, ConfigError, limit=MAX_BYTES).splitlines(), start=1):
        entry = json_value(line, f"{file}:{number}", _TraceLine, ConfigError, what=what)
        arrivals.append(Arrival(entry.timestamp / 1e3, entry.input_length, entry.output_length))
    if not arrivals:
        raise ConfigError(f"{file}: expected a trace with requests, found none")
    return sorted(arrivals, key=lambda arrival: arrival.seconds)
