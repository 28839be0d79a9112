# SPDX-License-Identifier: Apache-2.0
"""Times of a layer's experts and of its attention, from measured tables (data/moe_kernels.json, data/attention.json).

Experts' time follows from the number that a pass touches; without a table it is bytes by bandwidth. The shortest call
of attention is a floor for every GPU of the list; time beyond it scales with memory bandwidth.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate

import msgspec

from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.files.json_file import package_data
from dflash_trt.observe.estimate.constants import DATA, Rates
from dflash_trt.observe.estimate.shapes import System

Curve = Callable[[float], float]


def curve_through(points: Sequence[tuple[float, float]]) -> Curve:
    """Interpolates logarithms; constant before the first point, proportional after the last."""

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


@cache
def monotone(table: tuple[tuple[int, float], ...]) -> list[tuple[float, float]]:
    """Tokens and microseconds, measurement noise removed: more tokens never take less."""
    return list(zip((float(tokens) for tokens, _ in table), accumulate((time for _, time in table), max), strict=True))


TABLE_EXPONENT = 1.2
"""Exponent of the power law under which the skewed tables were measured."""


class ExpertKernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured table: microseconds by tokens of a pass."""

    gpu: str
    hidden_size: int
    expert_intermediate_size: int
    num_experts: int
    top_k: int
    tensor_parallel: int
    weights: str
    runtime: str
    kernel: str
    microseconds: tuple[tuple[int, float], ...]
    """Tokens and time, fewest tokens first, every expert given as many as any other."""
    skewed_microseconds: tuple[tuple[int, float], ...] = ()
    """Time under a power law of exponent 1.2, if measured: popular experts take several tiles."""

    def seconds(self, touched: float, tokens: float, skew: float) -> float:
        """For `tokens` that take `touched` experts between them; `skew` 0 is balanced routing, 1 that power law's.

        Balanced routing spreads n tokens over min(E, n top_k) experts, so that the table is one of seconds by experts
        touched, until all are; growth beyond that is the tokens' arithmetic.
        """
        at, reads_all = partial(_interpolated, self.microseconds), self.num_experts / self.top_k
        balanced = at(touched / self.top_k) + (at(tokens) - at(reads_all) if tokens > reads_all else 0.0)
        if not self.skewed_microseconds:
            return balanced
        return balanced + skew * (_interpolated(self.skewed_microseconds, tokens) - balanced)


class _ExpertTables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    date: str
    unit: str
    kernels: tuple[ExpertKernel, ...]


@cache
def expert_tables() -> _ExpertTables:
    return package_data(DATA / "moe_kernels.json", _ExpertTables)


@cache
def measured_kernel(gpu: str, target: TargetShape, ranks: int, runtime: str) -> ExpertKernel | None:
    """The table for a target's experts on one of `ranks` tensor-parallel ranks: the runtime's, else another's."""
    shape = (target.hidden_size, target.expert_intermediate_size, target.num_experts, target.top_k)
    measured = [
        kernel for kernel in expert_tables().kernels
        if (kernel.hidden_size, kernel.expert_intermediate_size, kernel.num_experts, kernel.top_k) == shape
        and (kernel.gpu, kernel.tensor_parallel) == (gpu, ranks)
        and (4.25 if kernel.weights.startswith("w4") else 16.0) == target.expert_bits
    ]  # fmt: skip
    return min(measured, key=lambda kernel: not kernel.runtime.startswith(f"{runtime} "), default=None)


def expert_seconds(system: System, tokens: float, touched: float, skew: float, rates: Rates) -> float:
    """Seconds of one layer on the busiest rank; at least its bytes at the memory's peak rate."""
    target, ranks, expert_ranks = system.target, system.tensor_parallel, system.expert_parallel
    share = 1.0 if expert_ranks == 1 else min(1.0, rates.expert_imbalance / expert_ranks)
    experts = touched * share
    slices = max(1, ranks // expert_ranks)  # tensor-parallel ranks that share one expert
    num_bytes = experts * target.expert_params * target.expert_bits / 8 / slices
    roof = num_bytes / rates.memory_bandwidth
    kernel = measured_kernel(system.gpu.name, target, slices, system.runtime)
    if kernel is not None:
        return max(roof, rates.moe_factor * kernel.seconds(experts, tokens * share, skew if expert_ranks == 1 else 0.0))
    flops = 2 * tokens * share * target.top_k * target.expert_params / slices
    # Four-bit experts with 16-bit activations: the tensor cores work in BF16.
    compute = flops / rates.compute_rate(max(target.expert_bits, 16 if target.expert_bits < 8 else 0))
    reading = num_bytes / (rates.memory_bandwidth * rates.moe_bandwidth_efficiency)
    return max(roof, rates.moe_kernel_seconds + max(reading, compute))


def _interpolated(table: tuple[tuple[int, float], ...], tokens: float) -> float:
    """Seconds, between the table's points and beyond its last one linearly."""
    points = monotone(table)
    place = min(max(bisect_right(points, (tokens, float("inf"))) - 1, 0), len(points) - 2)
    (x0, y0), (x1, y1) = points[place], points[place + 1]
    return max(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), points[0][1]) * 1e-6


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
