# SPDX-License-Identifier: Apache-2.0
"""Checks of sampling in torch's operators, on a CPU or a GPU: rows, the compiled rule, and comparisons."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from dflash_trt import _C
from dflash_trt.engine.proposals import Proposals
from dflash_trt.runtime import sampling
from tests.reference.sampling import Logits, Params

POSITION = 2**32 - 2
"""Output position of the first row; later ones need more than 32 bits."""
ALL = 10**6
"""More weights than a row has."""


def native(params: Params) -> _C.SamplerParams:
    return _C.SamplerParams(**asdict(params))


def by_rule(logits: Logits, params: Sequence[Params]) -> list[int]:
    """Each row's token, by the compiled rule."""
    rows = enumerate(zip(logits, params, strict=True))
    return [_C.verify_block(row[None], [], native(own), POSITION + i)[0] for i, (row, own) in rows]


def by_torch(logits: Logits, params: Sequence[Params], heaviest: int = ALL, module: Any = sampling) -> list[int]:
    """Each row's token as torch computes it; -1 where it looks at too few weights."""
    blocks = [(native(own), POSITION + i, range(i, i + 1), Proposals([])) for i, own in enumerate(params)]
    return sampled(logits, blocks, heaviest, module)


def sampled(logits: Logits, blocks: Sequence[Any], heaviest: int = ALL, module: Any = sampling) -> list[int]:
    tensor, out = torch.tensor(logits), torch.full([len(logits)], -2)
    draws = [draw for block in blocks for draw in module.row_draws(*block, logits.shape[1])]
    module.sample(tensor, tensor.amax(-1), draws, out, heaviest)
    return out.tolist()


def random_params(rng: np.random.Generator, vocab: int) -> Params:
    """Settings at their edges and between."""

    def one_of(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    return Params(
        temperature=one_of(1e-3, 0.3, 0.7, 1.0, 1.0, 1.5, 100.0),
        top_k=one_of(0, 0, 1, 2, int(rng.integers(1, vocab + 2)), vocab, 2**31 - 1),
        top_p=one_of(1.0, 1.0, 0.9, 0.5, 1e-300, float(rng.random()), 1 - 2**-53),
        min_p=one_of(0.0, 0.0, 0.05, 1.0, 1e-12),
        seed=int(rng.integers(2**64, dtype=np.uint64)),
    )


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> Logits:
    """With ties, large differences and tokens that cannot occur."""
    logits = rng.normal(0, rng.choice([0.01, 1, 4, 20], (rows, 1)), (rows, vocab)).astype(np.float32)
    tied = rng.random(rows) < 0.4
    logits[tied] = np.round(logits[tied])
    logits[rng.random((rows, vocab)) < rng.choice([0, 0.3, 0.99], (rows, 1))] = -np.inf
    logits[np.arange(rows), rng.integers(0, vocab, rows)] = rng.normal(size=rows)
    return logits


def kept(weights: Sequence[int], top_k: int, top_p: float) -> list[int]:
    """Weights that the filters leave, by their definition in docs/sampling.md."""
    left = [w for w in weights if top_k == 0 or sum(v > w for v in weights) < top_k]
    limit = math.ceil(float(sum(left)) * top_p) if top_p < 1 else math.inf
    return [w for w in left if sum(v for v in left if v > w) < limit]


def check_filters(module: Any) -> None:
    """In a few small weights, so that sums meet their limits."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        weights = rng.integers(1, 5, int(rng.integers(1, 9)))
        top_k, top_p = int(rng.integers(1, len(weights) + 1)), float(rng.choice([1.0, 0.75, 0.5, 0.25]))
        top_k = 0 if top_p < 1 and rng.random() < 0.5 else top_k
        given = torch.tensor(weights)[None], torch.tensor([[top_k]]), torch.tensor([[top_p]]).double()
        for heaviest in range(1, len(weights) + 1):
            lowest, is_known = module.lowest_kept_weight(*given, heaviest)
            assert is_known or heaviest < len(weights)
            assert not is_known or sorted(w for w in weights if w >= lowest.item()) == sorted(
                kept(weights, top_k, top_p)
            )


def check_token(module: Any) -> None:
    """Random numbers at, and next to, the boundaries between tokens."""
    rng = np.random.default_rng(2)
    for vocab in (1, 3, 8, 1024):
        weights = rng.integers(0, 2**43, vocab)
        weights[rng.random(vocab) < 0.3] = 0
        weights[-1] = 2**43
        lowest = int(rng.choice(weights))
        cumulative = np.where(weights >= lowest, weights, 0).cumsum()
        mass = int(cumulative[-1])
        edges = {int(edge) * 2**53 // mass + near for edge in cumulative[-4:] for near in (-1, 0, 1)}
        for number in {0, *edges} - {-1, 2**53, 2**53 + 1}:
            expected = int(np.searchsorted(cumulative, number * mass >> 53, side="right"))
            given = torch.tensor(np.where(weights >= lowest, weights, 0))[None], torch.tensor([[number]])
            assert module.drawn(*given).item() == expected


def check_weights(module: Any) -> None:
    """To the bit, by the share of the sum that each is in double; mostly heavy ones, which a last bit changes."""
    rng = np.random.default_rng(4)
    for temperature in (1e-3, 0.3, 0.7, 1.0, 100.0):
        logits = (-temperature * rng.exponential(3, 2**15)).astype(np.float32)
        expected = np.empty(len(logits))
        _C.token_probabilities(logits, _C.SamplerParams(temperature=temperature), expected)
        row = torch.tensor(logits)[None]
        weights = module.to_weights(
            row, row.amax(-1, keepdim=True), torch.tensor([[temperature]], dtype=torch.float64), torch.tensor([[0]])
        )
        assert (weights[0].double() / weights.sum().double()).tolist() == expected.tolist()


def check_rows(module: Any) -> None:
    rng = np.random.default_rng(6)
    logits, params = random_logits(rng, 64, 96), [random_params(rng, 96) for _ in range(64)]
    assert by_torch(logits, params, ALL, module) == by_rule(logits, params)


def check_judged(module: Any) -> None:
    """Blocks of a drawn proposal, mostly from about the target's distribution, and the token after it."""
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 1.5, (2 * 300, 24)).astype(np.float32)
    expected, blocks = list[list[int]](), list[Any]()
    for row in range(0, len(logits), 2):
        params = native(random_params(rng, 24))
        ids = np.argsort(-logits[row] - rng.normal(0, 0.3, 24))[None, :6]
        q = np.exp((logits[row, ids] - logits[row, ids].max()).astype(np.float64) / params.temperature)
        q = q / q.sum() if rng.random() < 0.8 else rng.dirichlet(np.ones(6), 1)
        proposals = [int(rng.choice(ids[0], p=q[0]))]
        blocks.append((params, row, range(row, row + 2), Proposals(proposals, ids, q)))
        expected.append(_C.verify_block(logits[row : row + 2], proposals, params, row, None, None, ids, q))
    found = sampled(logits, blocks, ALL, module)
    assert 50 < sum(map(len, expected)) - len(expected) < 250, "some hold, and some do not"
    for (_, row, _, drafted), tokens in zip(blocks, expected, strict=True):
        assert found[row : row + 1 + (found[row] == drafted.token_ids[0])] == tokens
    weights, zero = torch.tensor([[5, 5, 0]]), torch.tensor([[0]])
    q = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    assert module.judge(weights, zero, zero, torch.tensor([[0, 1]]), q).item()
    assert weights.tolist() == [[2, 0, 0]], "two and a half of ten are three, and no weight is negative"


def check_all(module: Any) -> None:
    check_rows(module)
    check_weights(module)
    check_token(module)
    check_filters(module)
    check_judged(module)
