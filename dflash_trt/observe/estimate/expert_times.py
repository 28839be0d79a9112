# SPDX-License-Identifier: Apache-2.0
"""Time of a layer's experts from measured tables (data/moe_kernels.json), by the number that a pass touches.

Without a table, time is bytes by bandwidth.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cache, partial

import msgspec

from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.files.json_file import package_data
from dflash_trt.observe.estimate.constants import DATA, Rates
from dflash_trt.observe.estimate.monotone_curve import monotone
from dflash_trt.observe.estimate.shapes import System

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
