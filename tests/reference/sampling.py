# SPDX-License-Identifier: Apache-2.0
"""Speculative sampling twice: the rule that dflash_trt._C computes, and the textbook's (docs/sampling.md).

Written for reading: a token is compared with every other one, so keep V small.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float64]
Weights = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Params:
    """The settings of one request; the defaults are softmax sampling."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Ten rounds (Salmon et al., SC 2011, section 4.3)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def uniform_bits(seed: int, position: int, draw: int = 0) -> int:
    """u * 2^53 for the u of one output position: 0 its token's, 1 its proposal's, 2 of whether that is accepted."""
    x0, x1, _, _ = philox4x32((position % 2**32, position >> 32, draw, 0), (seed % 2**32, seed >> 32))
    return (x0 * 2**32 + x1) >> 11


def penalised(logits: Logits, params: Params, prompt: Sequence[int], output: Sequence[int]) -> Logits:
    """A row [V] after the repetition, frequency and presence penalties."""
    result = logits.copy()
    for token in {*prompt, *output}:
        if token >= len(logits):
            continue
        logit, count = float(logits[token]), output.count(token)
        logit = logit * params.repetition_penalty if logit < 0 else logit / params.repetition_penalty
        logit -= params.frequency_penalty * count
        logit -= params.presence_penalty * (count > 0)
        result[token] = logit
    return result


def kept_weights(logits: Logits, params: Params) -> Weights:
    """A row [V] as integers in proportion to the probabilities; 0 where a filter removes the token."""
    scaled = (logits.astype(np.float64) - float(logits.max())) / params.temperature
    weights = np.rint(2.0**43 * np.exp(scaled)).astype(np.int64)
    heavier = weights[None, :] > weights[:, None]  # [v, w]: w weighs more than v
    keep = weights >= math.ceil(params.min_p * 2**43)
    in_top_k = heavier.sum(axis=1) < params.top_k if params.top_k else np.ones(len(weights), dtype=bool)
    if params.top_p < 1:
        left = np.where(in_top_k, weights, 0)
        keep &= (heavier * left).sum(axis=1) < math.ceil(float(left.sum()) * params.top_p)
    return np.where(keep & in_top_k, weights, 0)


def probabilities(logits: Logits, params: Params, prompt: Sequence[int], output: Sequence[int]) -> Probabilities:
    """The distribution [V] of the token after `output`."""
    logits = penalised(logits, params, prompt, output)
    if params.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    weights = kept_weights(logits, params)
    return weights / weights.sum()


def sample(logits: Logits, params: Params, prompt: Sequence[int], output: Sequence[int], position: int) -> int:
    """The token at an output position: the inverse of the cumulative distribution, in id order, at u."""
    logits = penalised(logits, params, prompt, output)
    if params.temperature == 0:
        return int(logits.argmax())
    cumulative = kept_weights(logits, params).cumsum()
    below = uniform_bits(params.seed, position) * int(cumulative[-1]) >> 53
    return int(np.searchsorted(cumulative, below, side="right"))


def verify_block(
    logits: Logits,
    proposals: Sequence[int],
    params: Params,
    position: int,
    prompt: Sequence[int],
    output: Sequence[int],
) -> list[int]:
    """The coupled rule: sample the target's own tokens [K + 1, V] until a proposal differs."""
    emitted: list[int] = []
    for row, row_logits in enumerate(logits):
        emitted.append(sample(row_logits, params, prompt, [*output, *emitted], position + row))
        if row < len(proposals) and emitted[row] != proposals[row]:
            break
    return emitted


def verify_drawn(
    logits: Logits,
    proposals: Sequence[int],
    params: Params,
    position: int,
    prompt: Sequence[int],
    output: Sequence[int],
    candidates: npt.NDArray[np.int64],
    drawn_with: Probabilities,
    *,
    subtract: bool = True,
) -> list[int]:
    """Rejection sampling (arXiv 2211.17192, algorithm 1) of proposals drawn from `drawn_with` [K, k] of `candidates`.

    Without `subtract` a rejected proposal is replaced by a draw from all of p: a mistake that tests must see.
    """
    emitted: list[int] = []
    for row, proposal in enumerate(proposals):
        p = probabilities(logits[row], params, prompt, [*output, *emitted])
        q = np.zeros_like(p)
        q[candidates[row]] = drawn_with[row]
        if uniform_bits(params.seed, position + row, 2) / 2**53 * q[proposal] >= p[proposal]:
            u = uniform_bits(params.seed, position + row) / 2**53
            return [*emitted, _inverse_cdf(np.maximum(0, p - q) if subtract else p, u)]
        emitted.append(proposal)
    last = sample(logits[len(proposals)], params, prompt, [*output, *emitted], position + len(proposals))
    return [*emitted, last]


def textbook_verify(
    target: Probabilities, proposals: Sequence[int], draw: Callable[[], float], *, exclude_rejected: bool = True
) -> list[int]:
    """Leviathan et al. (arXiv 2211.17192), algorithm 1, for a drafter that is certain of each proposal.

    target [K + 1, V]. Without `exclude_rejected` a rejected proposal is replaced by a draw from the whole
    distribution instead of the residual: a mistake that tests must see.
    """
    emitted: list[int] = []
    for row, proposal in enumerate(proposals):
        if draw() >= target[row, proposal]:
            residual = target[row].copy()
            if exclude_rejected:
                residual[proposal] = 0
            return [*emitted, _inverse_cdf(residual, draw())]
        emitted.append(proposal)
    return [*emitted, _inverse_cdf(target[len(proposals)], draw())]


def _inverse_cdf(weights: Probabilities, u: float) -> int:
    cumulative = weights.cumsum()
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
