# SPDX-License-Identifier: Apache-2.0
"""Sampling in torch's operators is to the bit that of `_C`, which is that of the reference; mistakes are seen.

A CPU computes each operator as a GPU does: it rounds once.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._inductor import config

from dflash_trt import _C
from dflash_trt.engine import fused
from dflash_trt.engine.fused import ROUNDS_EACH
from dflash_trt.runtime import sampling
from dflash_trt.runtime.drafter.candidate_selector import Proposals
from dflash_trt.runtime.penalties import Penalised, penalise
from tests.reference import sampling as reference
from tests.reference.sampling import Logits, Params
from tests.runtime.drafter.torch.inductor import compile_ptx, written

POSITION = 2**32 - 2
"""Output position of the first row; those behind need more than 32 bits."""
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


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5, 64, 127, 512, 1536, 1537]), st.integers(1, 24))
def test_tokens_are_those_of_the_compiled_rule(seed: int, vocab: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    logits, params = random_logits(rng, rows, vocab), [random_params(rng, vocab) for _ in range(rows)]
    expected = by_rule(logits, params)
    assert by_torch(logits, params) == expected
    for found, token, own in zip(by_torch(logits, params, 8), expected, params, strict=True):
        assert found == token or (found == -1 and (own.top_k > 0 or own.top_p < 1) and vocab > 8)


def test_a_large_vocabulary_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows at a time; and the usual number of weights is enough for usual settings."""
    monkeypatch.setattr(sampling, "PART_BYTES", 2 * 8 * 200_064)
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 3, (5, 200_064)).astype(np.float32)
    settings: list[dict[str, Any]] = [
        {},
        {"top_k": 20, "top_p": 0.95},
        {"top_p": 0.5, "temperature": 0.6},
        {"min_p": 0.1},
    ]
    params = [Params(**own, seed=i) for i, own in enumerate([*settings, {}])]
    assert by_torch(logits, params, sampling.HEAVIEST) == by_rule(logits, params)


def kept(weights: Sequence[int], top_k: int, top_p: float) -> list[int]:
    """Weights that the filters leave, by their definition in docs/sampling.md."""
    left = [w for w in weights if top_k == 0 or sum(v > w for v in weights) < top_k]
    limit = math.ceil(float(sum(left)) * top_p) if top_p < 1 else math.inf
    return [w for w in left if sum(v for v in left if v > w) < limit]


def check_filters(module: Any) -> None:
    """In a few small weights, so that sums meet their limits."""
    rng = np.random.default_rng(1)
    for _ in range(200):
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
        weights = module.to_weights(row, row.amax(-1, keepdim=True), torch.tensor([[temperature]], dtype=torch.float64))
        assert (weights[0].double() / weights.sum().double()).tolist() == expected.tolist()


def check_rows(module: Any) -> None:
    rng = np.random.default_rng(6)
    logits, params = random_logits(rng, 64, 96), [random_params(rng, 96) for _ in range(64)]
    assert by_torch(logits, params, ALL, module) == by_rule(logits, params)


def check_judged(module: Any) -> None:
    """Blocks of a proposal that was drawn, mostly by about the target's distribution, and the token behind it."""
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
    check_judged(module)
    check_filters(module)
    check_token(module)
    check_weights(module)


def test_each_step_is_what_it_is_said_to_be() -> None:
    check_all(sampling)


MISTAKES = {
    "a sum fused with its product": ("total = total * r + coefficient", "total = contracted(total, r, coefficient)"),
    "a product with the reciprocal": ("best.double()) / temperature", "best.double()) * (1 / temperature)"),
    "torch's exp": ("shifted = x", "return (x.exp() * 2**43).round().long()\n    shifted = x"),
    "the lightest goes": ("weights.mul_(weights >= least)", "weights.mul_(weights > least)"),
    "the token before the boundary": ("(within <= below)", "(within < below)"),
    "the block before the boundary": ("(cumulative <= below)", "(cumulative < below)"),
    "top_p before top_k": ("(weights * (weights >= of_top_k))", "weights"),
    "a mass that is met is not enough": ("(cumulative - top < limit)", "(cumulative - top <= limit)"),
    "a limit that is rounded": (".ceil_()", ".round_()"),
    "too few weights are enough": ("(cumulative[:, -1:] >= limit) &", ""),
    "nothing is subtracted": ("kept - removed * is_left", "kept"),
    "one number for token and judgement": ("len(drafted.token_ids), 2)", "len(drafted.token_ids), 0)"),
    "half to even": ("(of_draft - down >= 0.5)", "(of_draft - down > 0.5)"),
    "a lost carry": (" + carried >> 26", " >> 26"),
}  # fmt: skip


def contracted(a: torch.Tensor, b: Any, c: Any) -> torch.Tensor:
    """a * b + c, rounded once but for a bit in two thousand: NumPy's long double has 64."""
    wide = [np.asarray(x, dtype=np.longdouble) for x in (a, b, c)]
    return torch.from_numpy((wide[0] * wide[1] + wide[2]).astype(np.float64))


@pytest.mark.parametrize(("right", "wrong"), MISTAKES.values(), ids=list(MISTAKES))
def test_mistakes_are_seen(right: str, wrong: str) -> None:
    source = inspect.getsource(sampling)
    assert source.count(right) == 1
    planted = ModuleType("planted")
    planted.__dict__["contracted"] = contracted
    exec(source.replace(right, wrong), planted.__dict__)
    with pytest.raises((AssertionError, RuntimeError)):  # or torch finds no token there
        check_all(planted)


def test_penalties_are_those_of_the_reference() -> None:
    """To the bit, behind each proposal; a prompt may hold ids that there are no logits of."""
    rng = np.random.default_rng(5)
    logits, expected, blocks = rng.normal(0, 3, (40, 12)).astype(np.float32), np.empty((40, 12), np.float32), []
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    for begin in range(0, 40, 4):
        repetition, presence, frequency = (float(rng.choice(given)) for given in ((1, 1.05, 0.8), (0, 0.7), (0, -0.3)))
        params = Params(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
        prompt, output, proposals = (rng.integers(0, most, 3).tolist() for most in (14, 12, 12))
        blocks.append(Penalised(range(begin, begin + 4), native(params), prompt, output, proposals))
        for i in range(4):
            expected[begin + i] = reference.penalised(logits[begin + i], params, prompt, output + proposals[:i])
    found = torch.tensor(logits)
    penalise(found, blocks)
    assert found.tolist() == expected.tolist()


@given(st.integers(0, 2**53 - 1), st.integers(1, 2**62 - 1))
def test_the_share_of_a_sum(bits: int, mass: int) -> None:
    for b, m in ((bits, mass), (2**53 - 1, mass), (bits, 2**62 - 1), (2**53 - 1, 2**62 - 1)):
        assert sampling.share(torch.tensor([[b]]), torch.tensor([[m]])).item() == b * m >> 53


@pytest.mark.full
def test_the_kernel_of_weights_for_an_h100_rounds_each_sum_and_product(tmp_path: Path) -> None:
    """Compiled by Triton on a CPU; ptxas leaves apart what names its rounding."""
    row = torch.zeros(3, 151_936)
    given = row, row[:, :1].clone(), torch.ones(3, 1).double()

    class Weights(torch.nn.Module):
        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            weights: torch.Tensor = sampling.to_weights.function(*tensors)
            return weights

    for options in ({}, ROUNDS_EACH):
        with config.patch(options):
            code = written(Weights(), given)
        (ptx,) = compile_ptx(code, (9, 0), tmp_path)
        operations = set(re.findall(r"\b(?:add|sub|mul|fma)\.(?:rn\.)?f64", ptx))
        assert (operations == {"add.rn.f64", "sub.rn.f64", "mul.rn.f64"}) is bool(options)


@pytest.mark.full
def test_weights_that_inductor_compiles_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for a CPU, with the option that a GPU needs."""
    asked, compiles = list[object](), torch.compile
    monkeypatch.setattr(fused, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(fused, "why_not_compiled", lambda: None)
    monkeypatch.setattr(sampling.to_weights, "_compiled", None)
    monkeypatch.setattr(torch, "compile", lambda f, **given: asked.append(given) or compiles(f, **given))
    check_weights(sampling)
    assert asked == [{"options": ROUNDS_EACH}]
