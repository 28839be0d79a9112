# SPDX-License-Identifier: Apache-2.0
"""Samples tokens where the logits lie: the rule of docs/sampling.md in torch's operators, for a GPU.

Tokens are to the bit those of cpp/sampling. So each product and each sum rounds, as in a kernel of its own: `addcmul`,
`alpha=`, functions compiled without ROUNDS_EACH, and a quotient by a number, of which torch makes a product, would not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_trt import _C
from dflash_trt.device.fused import ROUNDS_EACH, Fused
from dflash_trt.device.upload import uploaded
from dflash_trt.engine.proposals import Proposals

WEIGHT_BITS = 43
MAX_VOCAB_SIZE = 2**19
"""Sums of weights stay below 2^62."""
HEAVIEST = 1024
"""Weights of a row that filters look at first: those that they keep are nearly always among them."""
PART_BYTES = 2**26
"""Doubles of the rows that are sampled together: a few times that is taken of a GPU's memory."""
BLOCK = 512
"""Tokens whose weights are summed before any cumulative sum, for which torch gives a row only one block of a GPU."""


class Judged(NamedTuple):
    """A proposal that was drawn."""

    token_id: int
    bits: int
    """The random number that it is judged by, in units of 2^-53."""
    candidate_ids: NDArray[np.int64]
    """[k], of which it was drawn."""
    probabilities: NDArray[np.float64]


class RowDraw(NamedTuple):
    """Settings of one row; a table of doubles holds its numbers, as no integer is beyond 2^53."""

    row: int
    """Place in the logits."""
    bits: int
    """The random number of its output position, in units of 2^-53."""
    temperature: float
    top_k: int
    """0: off."""
    top_p: float
    least: int
    """Smallest weight that min_p leaves."""
    judged: Judged | None = None

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether weights decide which tokens are left, beyond min_p, and whether a drawn proposal is judged."""
        return self.top_k > 0 or self.top_p < 1, self.judged is not None


def row_draws(
    params: _C.SamplerParams, position: int, rows: range, drafted: Proposals, vocab_size: int
) -> Iterator[RowDraw]:
    """Draws of output positions from `position` on, for temperature > 0."""
    judged: list[Judged | None] = [None] * len(rows)
    if drafted.candidate_ids is not None and drafted.probabilities is not None:
        bits = _C.uniform_bits(params.seed, position, len(drafted.token_ids), 2)
        judged[:-1] = map(Judged, drafted.token_ids, bits, drafted.candidate_ids, drafted.probabilities)
    top_k = params.top_k if params.top_k < vocab_size else 0
    least = math.ceil(params.min_p * 2**WEIGHT_BITS)
    for row, bits_of_row, own in zip(rows, _C.uniform_bits(params.seed, position, len(rows)), judged, strict=True):
        yield RowDraw(row, bits_of_row, params.temperature, top_k, params.top_p, least, own)


@torch.inference_mode()
def sample(logits: Tensor, best: Tensor, draws: Sequence[RowDraw], out: Tensor, heaviest: int = HEAVIEST) -> None:
    """Fills `out` [R] int64 with the tokens of the rows of logits [R, V] FLOAT that draws name; best [R] is their max.

    A drawn proposal is the token if it is accepted; else the token is drawn from the residual distribution. A token is
    -1 if the filters may leave more than the `heaviest` weights; repeat with `heaviest` = V, at the cost of sorting the
    row. The host does not wait. Rows that are not finite get an arbitrary token, and rows after a rejected proposal
    cost as much as others.
    """
    vocab_size, kind = logits.shape[-1], attrgetter("kind")
    assert vocab_size <= MAX_VOCAB_SIZE, "sums of weights would not fit"
    num_rows = max(1, PART_BYTES // (8 * vocab_size))
    for _, group in groupby(sorted(draws, key=kind), kind):
        alike = list(group)
        for begin in range(0, len(alike), num_rows):
            rows, tokens = _sample_alike(logits, best, alike[begin : begin + num_rows], min(heaviest, vocab_size))
            out[rows] = tokens


def _sample_alike(logits: Tensor, best: Tensor, draws: Sequence[RowDraw], heaviest: int) -> tuple[Tensor, Tensor]:
    """Rows [n] of draws of one kind, and their tokens [n]."""
    has_filter, is_judged = draws[0].kind
    numbers = _on(logits.device, [draw[:6] for draw in draws])[:, :, None]
    row, bits, _, top_k, _, least = numbers.long().unbind(1)
    rows = row[:, 0]
    weights = to_weights(logits[rows], best[rows, None], numbers[:, 2], least * (not has_filter))  # min_p comes last
    if has_filter:
        lowest, is_known = lowest_kept_weight(weights, top_k, numbers[:, 4], heaviest)
        weights.mul_(weights >= lowest.maximum(least))
    if is_judged:
        proposals, *drawn_from = _columns(logits.device, [draw.judged for draw in draws if draw.judged])
        holds = judge(weights, proposals, *drawn_from)
    tokens = drawn(weights, bits)
    if is_judged:
        tokens = torch.where(holds, proposals, tokens)
    if has_filter:
        tokens = torch.where(is_known, tokens, -1)
    return rows, tokens[:, 0]


def _columns(device: torch.device, judged: Sequence[Judged]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [n, 1], random numbers [n, 1] and candidates [n, k] int64, and their probabilities [n, k] FLOAT64."""
    token_ids, bits, candidate_ids, probabilities = (_on(device, column) for column in zip(*judged, strict=True))
    return token_ids[:, None].long(), bits[:, None].long(), candidate_ids.long(), probabilities


def _on(device: torch.device, rows: Sequence[Any]) -> Tensor:
    return uploaded(torch.from_numpy(np.array(rows, dtype=np.float64)), device)


def warm_up(device: str, vocab_size: int) -> None:
    """Compiles a GPU's kernels, for one row and for any other number, before requests run."""
    for num_rows in (1, 2):
        logits = torch.zeros(num_rows, vocab_size, device=device)
        draws = list(row_draws(_C.SamplerParams(), 0, range(num_rows), Proposals([]), vocab_size))
        sample(logits, logits[:, 0], draws, torch.zeros(num_rows, dtype=torch.int64, device=device))


LOWEST = -40.0
"""Exp(-40) is far below half a unit of weight."""
TO_INTEGER, TO_INTEGER_BITS = 1.5 * 2.0**52, 0x4338 << 48
"""A sum with this double has an integer, rounded to nearest even, in its low bits."""
LOG2_E = float.fromhex("0x1.71547652b82fep0")
LN2_HIGH, LN2_LOW = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")
COEFFICIENTS = [1 / math.factorial(n) for n in range(11, -1, -1)]


@partial(Fused, options=ROUNDS_EACH)
def to_weights(logits: Tensor, best: Tensor, temperature: Tensor, least: Tensor) -> Tensor:
    """round(2^43 exp((logits - best) / temperature)) [R, V] int64, in the steps of cpp/sampling/weights.cpp.

    Logits [R, V] FLOAT, their largest [R, 1] FLOAT, temperature [R, 1] FLOAT64. Values below the least weight [R, 1]
    int64 become 0. NaN, in a row whose token is never read, weighs most.
    """
    x = ((logits.double() - best.double()) / temperature).nan_to_num(nan=0.0).clamp(min=LOWEST)
    shifted = x * LOG2_E + TO_INTEGER
    n = shifted - TO_INTEGER
    r = x - n * LN2_HIGH - n * LN2_LOW
    total = r * COEFFICIENTS[0] + COEFFICIENTS[1]
    for coefficient in COEFFICIENTS[2:]:
        total = total * r + coefficient
    power = ((shifted.view(torch.int64) + (1023 + WEIGHT_BITS)) << 52).view(torch.float64)
    weights = (total * power + TO_INTEGER).view(torch.int64) - TO_INTEGER_BITS
    return torch.where(weights >= least, weights, 0)


def lowest_kept_weight(weights: Tensor, top_k: Tensor, top_p: Tensor, heaviest: int) -> tuple[Tensor, Tensor]:
    """Smallest weight [R, 1] that top_k, then top_p of the rest, keep in a row of weights [R, V].

    Second value: False if the cut-off may lie below the top `heaviest`.
    """
    top = weights.topk(heaviest).values
    of_top_k = top.gather(-1, (top_k - 1).clamp_(0, heaviest - 1)).masked_fill_(top_k == 0, 0)
    mass = (weights * (weights >= of_top_k)).sum(-1, keepdim=True)
    limit = torch.where(top_p < 1, (mass.double() * top_p).ceil_().long(), mass)
    cumulative = top.cumsum(-1)
    num_kept = (cumulative - top < limit).sum(-1, keepdim=True)  # the first of equal weights, plus the larger ones
    return top.gather(-1, num_kept - 1), (cumulative[:, -1:] >= limit) & (top_k <= heaviest)


def judge(weights: Tensor, proposals: Tensor, bits: Tensor, candidate_ids: Tensor, probabilities: Tensor) -> Tensor:
    """Whether proposals [R, 1], drawn from candidates [R, k] with probabilities [R, k] FLOAT64, hold: [R, 1].

    Weights [R, V] lose what the proposals were drawn from: max(0, p - q), unless rounding leaves nothing of that.
    """
    mass = weights.sum(-1, keepdim=True)
    kept, drawn_with = weights.gather(-1, candidate_ids), (probabilities * (candidate_ids == proposals)).sum(-1, True)
    holds = bits.double() * 2.0**-53 * drawn_with * mass.double() < weights.gather(-1, proposals).double()
    of_draft = probabilities * mass.double()
    down = of_draft.floor()
    removed = (down + (of_draft - down >= 0.5)).long().minimum(kept)  # half away from zero
    is_left = removed.sum(-1, keepdim=True) < mass
    weights.scatter_(-1, candidate_ids, kept - removed * is_left)
    return holds


def drawn(weights: Tensor, bits: Tensor) -> Tensor:
    """First id [R, 1] at which the cumulative sum of weights [R, V] exceeds bits / 2^53 of it."""
    size = math.gcd(weights.shape[-1], BLOCK)
    blocks = weights.view(len(weights), -1, size)
    sums = blocks.sum(-1)
    cumulative = sums.cumsum(-1)
    below = share(bits, cumulative[:, -1:])
    block = (cumulative <= below).sum(-1, keepdim=True)
    below -= (cumulative - sums).gather(-1, block)
    within = blocks.gather(1, block[..., None].expand(-1, -1, size))[:, 0].cumsum(-1)
    return block * size + (within <= below).sum(-1, keepdim=True)


def share(bits: Tensor, mass: Tensor) -> Tensor:
    """bits * mass >> 53 for bits < 2^53 and mass < 2^62: the product has no integer type, so it is made of limbs."""
    high, low = mass >> 31, mass & (1 << 31) - 1
    first, last = bits >> 27, bits & (1 << 27) - 1
    carried = (last * high << 4) + (last * low >> 27)
    return (first * high << 5) + (first * low + carried >> 26)
