# SPDX-License-Identifier: Apache-2.0
"""What the sampling functions refuse, and how they say so."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from dflash_trt import _C
from tests.cpp.test_sampling import native, verify
from tests.reference.sampling import Params


@pytest.mark.parametrize(
    ("value", "found"), [(np.nan, "NaN for token 2"), (-np.nan, "NaN for token 2"), (np.inf, r"\+infinity for token 2")]
)
def test_unusable_logits(value: float, found: str) -> None:
    logits = np.zeros((3, 4), dtype=np.float32)
    logits[1, 2] = value
    for params in (Params(), Params(temperature=0)):
        token = verify(logits[:1], [], params)[0]
        with pytest.raises(ValueError, match=f"{found} in row 1"):
            verify(logits, [token, 0], params)
        # The row behind a rejected proposal is not needed.
        assert verify(logits, [(token + 1) % 4, 0], params) == [token]
    with pytest.raises(ValueError, match=f"{found} in row 1"):
        _C.token_logprobs(logits, [0, 0])


def test_a_row_without_any_token() -> None:
    logits = np.full((1, 4), -np.inf, dtype=np.float32)
    with pytest.raises(ValueError, match="-infinity throughout in row 0"):
        verify(logits, [], Params())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "expected a finite temperature .* found -0.1"),
        ({"temperature": math.nan}, "expected a finite temperature .* found nan"),
        ({"temperature": math.inf}, "expected a finite temperature .* found inf"),
        ({"top_k": -1}, "expected top_k >= 0 .* found -1"),
        ({"top_p": 0.0}, r"expected top_p in \(0, 1\] .* found 0"),
        ({"top_p": 1.5}, r"expected top_p in \(0, 1\] .* found 1.5"),
        ({"min_p": -1e-9}, r"expected min_p in \[0, 1\] .* found -1.*e-09"),
        ({"min_p": 1.01}, r"expected min_p in \[0, 1\] .* found 1.01"),
        ({"repetition_penalty": 0.0}, "expected a positive finite repetition_penalty .* found 0"),
        ({"repetition_penalty": math.inf}, "expected a positive finite repetition_penalty .* found inf"),
        ({"presence_penalty": math.nan}, "expected a finite presence_penalty .* found nan"),
        ({"frequency_penalty": math.inf}, "expected a finite frequency_penalty .* found inf"),
    ],
)
def test_params_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.SamplerParams(**settings)


def test_params_are_what_was_given() -> None:
    params = Params(
        temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1.0,
        frequency_penalty=2.0, seed=2**64 - 1,
    )  # fmt: skip
    made = native(params)
    assert {name: getattr(made, name) for name in asdict(params)} == asdict(params)
    assert asdict(Params()) == {name: getattr(_C.SamplerParams(), name) for name in asdict(params)}
    with pytest.raises(AttributeError):
        made.seed = 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: verify(x, [1], Params()), r"one row of logits more than proposals \(2\), found 3"),
        (lambda x: verify(x, [1, 2, 3], Params()), r"one row of logits more than proposals \(4\), found 3"),
        (lambda x: verify(x, [1, 4], Params()), r"expected proposals in \[0, 4\), found 4"),
        (lambda x: verify(x, [-1, 0], Params()), r"expected proposals in \[0, 4\), found -1"),
        (lambda x: verify(x[:1], [], Params(presence_penalty=1), 2), "the 2 output ids before the position, found 0"),
        (lambda x: verify(x[:1], [], Params(presence_penalty=1), 1, [], [4]), r"output_ids in \[0, 4\), found 4"),
        (lambda x: verify(x[:1], [], Params(presence_penalty=1), 0, [-1]), "prompt_ids in .* found -1"),
        (lambda x: verify(x[:1, :0], [], Params()), "rows of 1 to 1048576 logits, found 0"),
        (lambda x: verify(np.zeros((1, 2**20 + 1), np.float32), [], Params()), "1048576 logits, found 1048577"),
        (lambda x: _C.token_probabilities(x[0], native(Params()), np.zeros(3)), "out of 4 probabilities, found 3"),
        (lambda x: _C.token_logprobs(x, [0] * 4), "a row of logits for each of 4 tokens, found 3"),
        (lambda x: _C.token_logprobs(x, [4]), r"expected token_ids in \[0, 4\), found 4"),
    ],
)
def test_arguments_must_fit(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(np.zeros((3, 4), dtype=np.float32))


@pytest.mark.parametrize(
    ("candidates", "probabilities", "message"),
    [
        ([[0, 1]], [[0.5, 0.5]], "a row for each of 2 proposals"),
        ([[0, 1], [1, 2]], [[0.5, 0.5]], "candidate_ids and probabilities of one shape"),
        ([[0, 4], [1, 2]], [[0.5, 0.5]] * 2, r"candidates in \[0, 4\), found 4"),
        ([[0, 1], [2, 3]], [[0.5, 0.5]] * 2, "proposal 1 once among its candidates, found 1"),
        ([[0, 0], [1, 2]], [[0.5, 0.5]] * 2, "proposal 0 once among its candidates, found 0"),
        ([[0, 1], [1, 2]], [[0.5, 0.5], [float("nan"), 0.5]], "from 0 to 1, found others for proposal 1"),
        ([[0, 1], [1, 2]], [[2.0, 0.5], [0.5, 0.5]], "from 0 to 1, found others for proposal 0"),
    ],
)
def test_distributions_must_fit(candidates: Any, probabilities: Any, message: str) -> None:
    logits = np.zeros((3, 4), dtype=np.float32)
    with pytest.raises(ValueError, match=message):
        _C.verify_block(logits, [0, 1], native(Params()), 0, None, None, np.array(candidates), np.array(probabilities))


def test_logits_are_not_copied_or_converted() -> None:
    params = native(Params())
    for logits in (np.zeros((1, 4)), np.zeros((4, 8), dtype=np.float32)[:1, ::2], np.zeros(4, dtype=np.float32)):
        with pytest.raises(TypeError):
            _C.verify_block(logits, [], params, 0)
    assert _C.verify_block(torch.zeros(1, 4), [], params, 0) == _C.verify_block(
        np.zeros((1, 4), dtype=np.float32), [], params, 0
    )
