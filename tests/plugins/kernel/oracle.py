# SPDX-License-Identifier: Apache-2.0
"""KV-injection attention in float64, and how far from it a kernel with 16-bit products may be."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.plugins.cases import EPS, Case
from tests.plugins.tensors import Tensors


class Expected(NamedTuple):
    """[B, S, N*D] float64 each."""

    output: torch.Tensor
    tolerance: torch.Tensor


def expect(case: Case, tensors: Tensors) -> Expected:
    """The exact output, and a bound on the error of a kernel whose products take 16-bit operands.

    Let u be half the distance from 1 to the next number of the block's dtype. The kernel rounds q and the block's k
    after rotation, the softmax's weights p, and the output, each relatively by at most u, and independently. So
      score:   ds = scale * u * sqrt(sum_d (q k)^2), twice for block rows, whose k is rounded too
      output:  do = u |o| + sqrt(sum_keys (p ds (v - o))^2 + (p u v)^2)
    The bound takes the root sums of squares four times: about seven standard deviations of a uniform rounding error.
    """
    outputs, tolerances = [], []
    for b in range(case.B):
        output, tolerance = _request(case, tensors, b)
        outputs.append(output)
        tolerances.append(tolerance)
    if not outputs:
        empty = torch.zeros(0, case.S, case.N * case.D, dtype=torch.float64)
        return Expected(empty, empty)
    return Expected(torch.stack(outputs), torch.stack(tolerances))


def _request(case: Case, tensors: Tensors, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    S, N, G, D = case.S, case.N, case.G, case.D
    length, slot = case.context_lengths[b], case.slot_of[b]
    q = norm_and_rotate(tensors.q[b].reshape(S, N, D), tensors.q_norm, tensors.rope[b])
    block_k = norm_and_rotate(tensors.k[b].reshape(S, G, D), tensors.k_norm, tensors.rope[b])
    block_v = tensors.v[b].double().reshape(S, G, D)
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
    outputs, tolerances = [], []
    for n in range(N):
        keys, values = k[:, n // (N // G)], v[:, n // (N // G)]
        scores = (q[:, n] @ keys.T * scale).masked_fill(~visible, -torch.inf)
        if tensors.sinks is not None:
            sink = tensors.sinks[n].double().expand(S, 1)
            weights = torch.cat([scores, sink], dim=1).softmax(dim=1)[:, :-1]
        else:
            weights = scores.softmax(dim=1)
        output = weights @ values
        score_error = scale * u * (q[:, n].square() @ keys.square().T).sqrt()
        score_error[:, length:] *= 2
        slope = (weights * score_error).square()
        # sum_keys slope (v - o)^2, without the [S, C, D] array
        moved = slope @ values.square() - 2 * (slope @ values) * output + slope.sum(dim=1, keepdim=True) * output**2
        rounded = u * u * (weights.square() @ values.square())
        outputs.append(output)
        tolerances.append(u * output.abs() + 4 * (moved.clamp(min=0) + rounded).sqrt() + 1e-6)
    return torch.cat(outputs, dim=1), torch.cat(tolerances, dim=1)


def norm_and_rotate(x: torch.Tensor, norm: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """[S, heads, D] and [S, D] of cos, sin -> [S, heads, D] float64."""
    x = x.double()
    x = x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt() * norm.double()
    first, second = x.chunk(2, dim=-1)
    cos, sin = rope.double()[:, None].chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
