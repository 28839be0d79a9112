# SPDX-License-Identifier: Apache-2.0
"""What a layer of our attention kernel takes: measured on one GPU (data/attention.json), scaled to others.

The shortest call is a floor that no GPU of the list is faster at; what a call takes beyond it goes with the memory.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache

import msgspec

from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.estimate.constants import DATA

COPY_RATE = 4.26e12
"""Bytes a second that a device-to-device copy reads and writes on the GPU of the tables."""
Curve = Callable[[float], float]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Microseconds of a call by requests and context rows of each, heads and cache format given."""

    head_dim: int
    num_key_value_heads: int
    cache_bytes: int
    """Bytes of a K or V element."""
    microseconds: tuple[tuple[int, int, float], ...]
    """Requests, context rows, time; both ascending."""

    @property
    def floor(self) -> float:
        """Microseconds of the shortest call."""
        return min(time for _, _, time in self.microseconds)

    def at(self, requests: float, rows: float) -> float:
        """Microseconds, interpolated between what was measured; rows beyond it are read at a copy's rate."""
        row_bytes = 2 * self.num_key_value_heads * self.head_dim * self.cache_bytes
        by_requests = []
        for batch in sorted({batch for batch, _, _ in self.microseconds}):
            cells = [(float(n), time) for b, n, time in self.microseconds if b == batch]
            added = max(0.0, rows - cells[-1][0]) * batch * row_bytes / COPY_RATE * 1e6
            by_requests.append((float(batch), _curve(cells)(min(rows, cells[-1][0])) + added))
        return _curve(by_requests)(requests)


class _Tables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    date: str
    gpu: str
    tables: tuple[Table, ...]


@cache
def tables() -> _Tables:
    return read_json(DATA / "attention.json", _Tables, ConfigError, what="the package's data")


def kernel_seconds(
    num_key_value_heads: float, head_dim: int, cache_bytes: int, requests: float, rows: float, memory_bandwidth: float
) -> float:
    """Seconds of one layer's call on a GPU with that memory, bytes a second; the heads are those of one rank."""
    measured = tables()
    near = min({table.head_dim for table in measured.tables}, key=lambda known: abs(math.log(known / head_dim)))
    chosen = [t for t in measured.tables if (t.head_dim, t.cache_bytes) == (near, cache_bytes)]
    floor = min(table.floor for table in chosen)
    time = _curve([(float(t.num_key_value_heads), t.at(requests, rows)) for t in chosen])(num_key_value_heads)
    slower = known_gpu(measured.gpu).memory_bandwidth / memory_bandwidth * head_dim / near
    return (floor + max(0.0, time - floor) * slower) * 1e-6


def _curve(points: Sequence[tuple[float, float]]) -> Curve:
    """Interpolates logarithms; constant before the first point, in proportion behind the last."""

    def at(x: float) -> float:
        place = bisect_right(points, (x, math.inf))
        if place == 0:
            return points[0][1]
        (x0, y0) = points[place - 1]
        if place == len(points):
            return y0 * x / x0
        x1, y1 = points[place]
        share = math.log(x / x0) / math.log(x1 / x0)
        return math.exp(math.log(y0) + share * math.log(y1 / y0))

    return at
