# SPDX-License-Identifier: Apache-2.0
"""KV-injection attention in float64, and how far from it a kernel with 16-bit products may be."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tests.plugins.cases import EPS, FP8, Case
from tests.plugins.compare import rounding
from tests.plugins.tensors import Tensors


class Expected(NamedTuple):
    """[B, S, N*D] float64 each."""

    output: torch.Tensor
    tolerance: torch.Tensor


def expect(case: Case, tensors: Tensors, *, rounded_queries: bool = False) -> Expected:
    """The exact output, and a bound on the error of a kernel whose products take 16-bit operands.

    With `rounded_queries`, queries are rounded to E4M3 for an FP8 cache's keys, as in `round_queries` and the sm_90a
    kernel: their rounding is part of the expected output, not of the bound.

    Let u be half the distance from 1 to the next number of the block's dtype. The kernel rounds q and the block's k
    after rotation, the softmax's weights p, and the output, each relatively by at most u, and independently. So
      score:   ds = scale * u * sqrt(sum_d (q k)^2), twice for block rows, whose k is rounded too
      output:  do = u |o| + sqrt(sum_keys (p ds (v - o))^2 + (p u v)^2) Values of the block are rounded once more where
    they have a bias. An FP8 output is rounded by its own u, and that stays within what the rest of the bound allows: of
    values beyond 448, 448.
    The bound takes the root sums of squares four times: about seven standard deviations of a uniform rounding error.

    A product of E4M3 keeps 13 bits after the point of its largest summand (kernel/wgmma_state.cuh). With 32 summands
    that may be 2^-8 of it, which stands in u's place for the scores of rounded queries.
    """
    rounded_queries &= case.cache_dtype is FP8
    outputs, tolerances = [], []
    for b in range(case.B):
        output, tolerance = _request(case, tensors, b, rounded_queries)
        outputs.append(output)
        tolerances.append(tolerance)
    if not outputs:
        empty = torch.zeros(0, case.S, case.N * case.D, dtype=torch.float64)
        return Expected(empty, empty)
    return Expected(torch.stack(outputs), torch.stack(tolerances))


def _request(case: Case, tensors: Tensors, b: int, rounded_queries: bool) -> Expected:
    S, N, G, D = case.S, case.N, case.G, case.D
    length, slot = case.context_lengths[b], case.slot_of[b]
    block = tensors.qkv[b].double()
    if tensors.qkv_bias is not None:
        block = block + tensors.qkv_bias.double()
    q, block_k, block_v = block.reshape(S, N + 2 * G, D).split([N, G, G], dim=1)
    q = norm_and_rotate(q, tensors.q_norm, tensors.rope[b])
    block_k = norm_and_rotate(block_k, tensors.k_norm, tensors.rope[b])
    rows = (slot, case.layer, slice(0, length))
    k = torch.cat([tensors.k_cache[rows].double() * case.k_scale, block_k])  # [C + S, G, D]
    v = torch.cat([tensors.v_cache[rows].double() * case.v_scale, block_v])

    device = q.device
    positions = torch.arange(length + S, device=device)
    queries = positions[length:, None]
    visible = torch.ones(S, length + S, dtype=torch.bool, device=device)
    if case.window:
        visible &= (queries - positions).abs() < case.window
    if case.causal:
        visible &= positions <= queries

    scale = case.softmax_scale or D**-0.5
    u = torch.finfo(case.dtype).eps / 2
    context_q, either = round_queries(q, G, scale * case.k_scale) if rounded_queries else (q, torch.zeros_like(q))
    context_u = 2.0**-8 if rounded_queries else u
    outputs, tolerances = [], []
    for n in range(N):
        keys, values = k[:, n // (N // G)], v[:, n // (N // G)]
        scores = torch.cat([context_q[:, n] @ keys[:length].T, q[:, n] @ keys[length:].T], dim=1) * scale
        scores = scores.masked_fill(~visible, -torch.inf)
        if tensors.sinks is not None:
            sink = tensors.sinks[n].double().expand(S, 1)
            weights = torch.cat([scores, sink], dim=1).softmax(dim=1)[:, :-1]
        else:
            weights = scores.softmax(dim=1)
        output = weights @ values
        score_error = scale * (q[:, n].square() @ keys.square().T).sqrt()
        score_error[:, length:] *= 2 * u
        score_error[:, :length] *= context_u
        score_error[:, :length] += scale * (either[:, n] @ keys[:length].abs().T)
        slope = (weights * score_error).square()
        # sum_keys slope (v - o)^2, without the [S, C, D] array
        moved = slope @ values.square() - 2 * (slope @ values) * output + slope.sum(dim=1, keepdim=True) * output**2
        if tensors.qkv_bias is not None:
            weights[:, length:] *= 2**0.5  # for the roundings of weights and values
        rounded = u * u * (weights.square() @ values.square())
        outputs.append(output)
        tolerances.append(4 * (moved.clamp(min=0) + rounded).sqrt() + 1e-6)
    return _rounded(case, torch.cat(outputs, dim=1), torch.cat(tolerances, dim=1))


def _rounded(case: Case, output: torch.Tensor, error: torch.Tensor) -> Expected:
    """An output with this error as it is written."""
    if not case.output_scale:
        return Expected(output, torch.finfo(case.dtype).eps / 2 * output.abs() + error)
    output, error = output / case.output_scale, error / case.output_scale
    return Expected(output.clamp(-448, 448), error + rounding(output.abs() + error, FP8))


def round_queries(q: torch.Tensor, G: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, N, D] float64 -> the same rounded as the kernel of sm_90a does, and by how much that may differ.

    Times `scale` and log2(e), to FP16, times a power of two for each of G groups of heads, to E4M3. The kernel has q in
    FP32, whose rounding decides where FP16's, and with it E4M3's, is about to change: there both are right.
    """
    factor = scale * math.log2(math.e)
    by_group = (1, G, 1, 1)

    def to_e4m3(x: torch.Tensor) -> torch.Tensor:
        half = (x * factor).half().reshape(len(q), G, -1, q.shape[-1]).float()
        exponents = torch.frexp(half.abs().amax(dim=(0, 2, 3)).clamp_min(2.0**-24)).exponent - 1
        powers = torch.ldexp(torch.ones(G, device=q.device), 7 - exponents).reshape(by_group)
        return ((half * powers).to(FP8).double() / powers).reshape(q.shape) / factor

    low, high = to_e4m3(q * (1 - 2.0**-18)), to_e4m3(q * (1 + 2.0**-18))
    return to_e4m3(q), (high - low).abs()


def norm_and_rotate(x: torch.Tensor, norm: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """[S, heads, D] and [S, D] of cos, sin -> [S, heads, D] float64."""
    x = x.double()
    x = x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * norm.double()
    first, second = x.chunk(2, dim=-1)
    cos, sin = rope.double()[:, None].chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
