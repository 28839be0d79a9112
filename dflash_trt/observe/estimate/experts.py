# SPDX-License-Identifier: Apache-2.0
"""A layer's experts: how many a pass touches, and their time: measured tables where there are any, else the bytes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.estimate.constants import DATA, Rates
from dflash_trt.observe.estimate.shapes import TargetShape


class Kernel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured table: microseconds by tokens of a pass, every expert given as many as any other."""

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
    """Tokens and time, fewest tokens first."""

    def seconds(self, touched: float, tokens: float) -> float:
        """For `tokens` that take `touched` experts between them.

        Balanced routing spreads n tokens over min(E, n top_k) experts, so that the table is one of seconds by experts
        touched, until all are; what it grows by from there on is the tokens' arithmetic.
        """
        reads_all = self.num_experts / self.top_k
        arithmetic = self._at(tokens) - self._at(reads_all) if tokens > reads_all else 0.0
        return self._at(touched / self.top_k) + arithmetic

    def _at(self, tokens: float) -> float:
        points = _monotone(self)
        place = min(max(bisect_right(points, (tokens, float("inf"))) - 1, 0), len(points) - 2)
        (x0, y0), (x1, y1) = points[place], points[place + 1]
        return max(y0 + (y1 - y0) * (tokens - x0) / (x1 - x0), points[0][1]) * 1e-6


class _Tables(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    source: str
    date: str
    unit: str
    kernels: tuple[Kernel, ...]


@cache
def tables() -> _Tables:
    return read_json(DATA / "moe_kernels.json", _Tables, ConfigError, what="the package's data")


@cache
def measured_kernel(gpu: str, target: TargetShape, ranks: int) -> Kernel | None:
    """The table for a target's experts on one of `ranks` tensor-parallel ranks."""
    shape = (target.hidden_size, target.expert_intermediate_size, target.num_experts, target.top_k)
    for kernel in tables().kernels:
        kernel_shape = (kernel.hidden_size, kernel.expert_intermediate_size, kernel.num_experts, kernel.top_k)
        bits = 4.25 if kernel.weights.startswith("w4") else 16.0
        if (kernel.gpu, kernel_shape, bits, kernel.tensor_parallel) == (gpu, shape, target.expert_bits, ranks):
            return kernel
    return None


def expert_seconds(
    gpu: str, target: TargetShape, ranks: int, expert_ranks: int, tokens: float, touched: float, rates: Rates
) -> float:
    """Of one layer on the busiest rank; never below what its bytes take at the memory's peak rate."""
    share = 1.0 if expert_ranks == 1 else min(1.0, rates.expert_imbalance / expert_ranks)
    experts = touched * share
    slices = max(1, ranks // expert_ranks)  # tensor-parallel ranks that share one expert
    num_bytes = experts * target.expert_params * target.expert_bits / 8 / slices
    roof = num_bytes / rates.hbm_bandwidth
    kernel = measured_kernel(gpu, target, slices)
    if kernel is not None:
        return max(roof, rates.moe_factor * kernel.seconds(experts, tokens * share))
    flops = 2 * tokens * share * target.top_k * target.expert_params / slices
    # Four-bit experts with 16-bit activations: the tensor cores work in BF16.
    compute = flops / rates.compute_rate(max(target.expert_bits, 16 if target.expert_bits < 8 else 0))
    reading = num_bytes / (rates.hbm_bandwidth * rates.moe_bandwidth_efficiency)
    return max(roof, rates.moe_kernel_seconds + max(reading, compute))


@cache
def _monotone(kernel: Kernel) -> list[tuple[float, float]]:
    """Tokens and microseconds, measurement noise removed: more tokens never take less."""
    points: list[tuple[float, float]] = []
    for tokens, value in kernel.microseconds:
        points.append((float(tokens), max(value, points[-1][1] if points else 0.0)))
    return points


@cache
def power_law(num_experts: int, top_k: int, exponent: float) -> tuple[float, ...]:
    """The probability that a token takes each expert, popularity falling as rank^-exponent; they sum to top_k."""
    weights = [(rank + 1) ** -exponent for rank in range(num_experts)]
    return inclusion(weights, top_k)


def inclusion(weights: Sequence[float], top_k: int) -> tuple[float, ...]:
    """Popularity (any scale) as the probability that a token takes each expert, at most 1, of sum `top_k`.

    p_i = 1 - (1 - w_i)^m, with the m that gives the sum: top_k draws without taking an expert twice, nearly.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    if top_k >= sum(share > 0 for share in shares):
        return tuple(float(share > 0) for share in shares)
    low, high = 0.0, 1.0
    while sum(1 - (1 - share) ** high for share in shares) < top_k:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if sum(1 - (1 - share) ** middle for share in shares) < top_k:
            low = middle
        else:
            high = middle
    return tuple(1 - (1 - share) ** high for share in shares)


def touched(probabilities: Sequence[float], tokens: float) -> float:
    """Expected number of experts that `tokens` tokens take between them: sum of 1 - (1 - p_i)^tokens."""
    return float(sum(1 - (1 - p) ** tokens for p in probabilities))
