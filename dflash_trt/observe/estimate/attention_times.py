# SPDX-License-Identifier: Apache-2.0
"""Time of a layer's attention kernel from a measured table (data/attention.json).

The shortest call is a floor for every GPU of the list; time beyond it scales with memory bandwidth.
"""

from __future__ import annotations

import math
from functools import cache

import msgspec

from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.files.json_file import package_data
from dflash_trt.observe.estimate.constants import DATA
from dflash_trt.observe.estimate.monotone_curve import curve_through

COPY_RATE = 4.26e12
"""Bytes a second that a device-to-device copy reads and writes on the GPU of the tables."""


class AttentionTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
            by_requests.append((float(batch), curve_through(cells)(min(rows, cells[-1][0])) + added))
        return curve_through(by_requests)(requests)


class _AttentionTables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    date: str
    gpu: str
    tables: tuple[AttentionTable, ...]


@cache
def attention_tables() -> _AttentionTables:
    return package_data(DATA / "attention.json", _AttentionTables)


def kernel_seconds(
    num_key_value_heads: float, head_dim: int, cache_bytes: int, requests: float, rows: float, memory_bandwidth: float
) -> float:
    """Seconds of one layer's call on a GPU with that memory, bytes a second; the heads are those of one rank."""
    measured = attention_tables()
    near = min({table.head_dim for table in measured.tables}, key=lambda known: abs(math.log(known / head_dim)))
    chosen = [t for t in measured.tables if (t.head_dim, t.cache_bytes) == (near, cache_bytes)]
    floor = min(table.floor for table in chosen)
    time = curve_through([(float(t.num_key_value_heads), t.at(requests, rows)) for t in chosen])(num_key_value_heads)
    slower = known_gpu(measured.gpu).memory_bandwidth / memory_bandwidth * head_dim / near
    return (floor + max(0.0, time - floor) * slower) * 1e-6
