# SPDX-License-Identifier: Apache-2.0
"""Sampling in torch's operators is to the bit that of `_C`, which is that of the reference; mistakes are seen.

A CPU computes each operator as a GPU does: it rounds once.
"""

from __future__ import annotations

import inspect
import re
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
from dflash_trt.device import fused
from dflash_trt.device.fused import ROUNDS_EACH
from dflash_trt.engine.proposals import Proposals
from dflash_trt.runtime import sampling
from dflash_trt.runtime.penalties import Penalised, penalise
from tests.reference import sampling as reference
from tests.reference.sampling import Params
from tests.runtime.drafter.torch.inductor import compile_as_on_gpu, compile_ptx, written
from tests.runtime.sampled_rows import (
    by_rule,
    by_torch,
    check_all,
    check_rows,
    check_weights,
    native,
    random_logits,
    random_params,
)


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


def test_each_step_is_what_it_is_said_to_be() -> None:
    check_all(sampling)


MISTAKES = {
    "a sum fused with its product": ("total = total * r + coefficient", "total = contracted(total, r, coefficient)"),
    "a product with the reciprocal": ("best.double()) / temperature", "best.double()) * (1 / temperature)"),
    "torch's exp": ("shifted = x", "return (x.exp() * 2**43).round().long()\n    shifted = x"),
    "the lightest goes": ("weights >= lowest.maximum", "weights > lowest.maximum"),
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
    with pytest.raises((AssertionError, RuntimeError)):  # otherwise torch finds no token there
        check_all(planted)


def test_penalties_are_those_of_the_reference() -> None:
    """Bit-identical after each proposal; a prompt may hold ids without logits."""
    rng = np.random.default_rng(5)
    logits, expected, blocks = rng.normal(0, 3, (40, 12)).astype(np.float32), np.empty((40, 12), np.float32), []
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    for begin in range(0, 40, 4):
        repetition, presence, frequency = (
            float(rng.choice(given)) for given in ((1.3, 1.05, 0.8), (0, 0.7), (0, -0.3))
        )
        params = Params(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
        prompt, output, proposals = (rng.integers(0, most, 3).tolist() for most in (14, 12, 12))
        answer = _C.Answer(native(params), prompt, 9, [])
        _C.append_all([answer], [Proposals(output[:2])], [output], 0.0)
        blocks.append(Penalised(range(begin, begin + 4), native(params), answer, proposals))
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
    given = row, row[:, :1].clone(), torch.ones(3, 1).double(), torch.zeros(3, 1).long()

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
    compile_as_on_gpu(monkeypatch)
    monkeypatch.setattr(sampling.to_weights, "_compiled", None)
    monkeypatch.setattr(torch, "compile", lambda f, **given: asked.append(given) or compiles(f, **given))
    check_weights(sampling)
    assert asked == [{"options": ROUNDS_EACH}]


def test_all_is_compiled_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch traces; what it would compile runs as it was traced."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = fused.compiled
    compile_as_on_gpu(monkeypatch)
    monkeypatch.setattr(fused, "compiled", lambda function, options: compiled(function, backend=backend))
    monkeypatch.setattr(sampling.to_weights, "_compiled", None)
    torch._dynamo.reset()
    sampling.warm_up("cpu", 96)
    assert len(graphs) == 2
    check_rows(sampling)
    assert len(graphs) == 2
