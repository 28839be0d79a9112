# SPDX-License-Identifier: Apache-2.0
"""verify_block and what it rests on, against known answers, the reference and transformers; and what they refuse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from dflash_trt import _C
from tests.reference import sampling as reference
from tests.reference.sampling import Logits, Params, Probabilities


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
        # The row after a rejected proposal is not needed.
        assert verify(logits, [(token + 1) % 4, 0], params) == [token]
    with pytest.raises(ValueError, match=f"{found} in row 1"):
        _C.token_logprobs(logits, [0, 0])


def test_logits_without_any_token_or_of_another_type() -> None:
    logits = np.full((1, 4), -np.inf, dtype=np.float32)
    with pytest.raises(ValueError, match="-infinity throughout in row 0"):
        verify(logits, [], Params())
    params = native(Params())
    for logits in (np.zeros((1, 4)), np.zeros((4, 8), dtype=np.float32)[:1, ::2], np.zeros(4, dtype=np.float32)):
        with pytest.raises(TypeError):
            _C.verify_block(logits, [], params, 0)
    assert _C.verify_block(torch.zeros(1, 4), [], params, 0) == _C.verify_block(
        np.zeros((1, 4), dtype=np.float32), [], params, 0
    )


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


SETTINGS = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product((0.3, 1.0, 1.5), (0, 1, 5), (1.0, 0.9, 0.3), (0.0, 0.05))
]
PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "presence_penalty": 0.7},
    {"presence_penalty": -0.5, "frequency_penalty": 0.9},
]


def ids(tokens: Sequence[int]) -> np.ndarray:
    return np.asarray(tokens, dtype=np.int64)


def native(params: Params) -> _C.SamplerParams:
    return _C.SamplerParams(**asdict(params))


def verify(
    logits: Logits,
    proposals: Sequence[int],
    params: Params,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> list[int]:
    return _C.verify_block(logits, list(proposals), native(params), position, ids(prompt), ids(output))


def probabilities(
    logits: Logits, params: Params, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> Probabilities:
    out = np.full(len(logits), np.nan)
    _C.token_probabilities(logits, native(params), out, ids(prompt), ids(output))
    return out


def random_logits(rng: np.random.Generator, rows: int, vocab: int, scale: float = 2.0) -> Logits:
    return rng.normal(0, scale, (rows, vocab)).astype(np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Random123 1.14, tests/kat_vectors, "philox4x32 10"
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    words = [[int(word, 16) for word in text.split()] for text in (counter, key, expected)]
    assert list(_C.philox4x32(words[0], words[1])) == words[2]
    assert list(reference.philox4x32(words[0], words[1])) == words[2]


@pytest.mark.parametrize("settings", SETTINGS)
def test_it_is_the_reference_token_for_token(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    for trial in range(24):
        vocab, num_proposals = int(rng.integers(2, 40)), int(rng.integers(0, 4))
        logits = random_logits(rng, num_proposals + 1, vocab, scale=rng.choice([0.1, 1.0, 4.0]))
        if trial % 3 == 0:
            logits = np.round(logits)  # many ties
        prompt = rng.integers(0, vocab + 2, 6).tolist()
        output = rng.integers(0, vocab, int(rng.integers(0, 9))).tolist()
        penalties = PENALTIES[trial % len(PENALTIES)] if trial % 2 else {}
        params = Params(**settings, **penalties, seed=int(rng.integers(2**64, dtype=np.uint64)))
        proposals: list[int] = []
        for row in range(num_proposals):
            own = reference.verify_block(logits[: row + 1], proposals, params, len(output), prompt, output)
            proposals.append(own[-1] if rng.random() < 0.7 else int(rng.integers(vocab)))
        expected = reference.verify_block(logits, proposals, params, len(output), prompt, output)
        assert verify(logits, proposals, params, len(output), prompt, output) == expected
        np.testing.assert_allclose(
            probabilities(logits[0], params, prompt, output),
            reference.probabilities(logits[0], params, prompt, output), rtol=1e-9, atol=1e-12,
        )  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS[::5])
def test_drawn_proposals_are_judged_as_by_the_reference(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(17)
    for trial in range(60):
        vocab, num_proposals = int(rng.integers(4, 40)), int(rng.integers(1, 4))
        logits = random_logits(rng, num_proposals + 1, vocab)
        output = rng.integers(0, vocab, int(rng.integers(0, 9))).tolist()
        penalties = PENALTIES[trial % len(PENALTIES)] if trial % 2 else {}
        params = Params(**settings, **penalties, seed=trial)
        candidates = np.stack([rng.permutation(vocab)[:4] for _ in range(num_proposals)])
        drawn_with = rng.dirichlet(np.ones(4), num_proposals)
        proposals = [int(rng.choice(tokens, p=q)) for tokens, q in zip(candidates, drawn_with, strict=True)]
        expected = reference.verify_drawn(logits, proposals, params, len(output), (), output, candidates, drawn_with)
        position = len(output)
        assert expected == _C.verify_block(
            logits, proposals, native(params), position, ids(()), ids(output), candidates, drawn_with
        )


def test_a_temperature_of_zero_reads_no_distribution() -> None:
    logits, nothing = random_logits(np.random.default_rng(1), 2, 5), np.zeros((1, 2))
    best = int(logits[0].argmax())
    candidates = np.array([[best, (best + 1) % 5]])
    emitted = _C.verify_block(logits, [best], native(Params(temperature=0)), 0, None, None, candidates, nothing)
    assert emitted == verify(logits, [best], Params(temperature=0))


def warped(logits: Logits, params: Params, history: Sequence[int]) -> Probabilities:
    """transformers 5.23: what `generate` applies, in its order, in double."""
    steps: list[Any] = []
    if params.repetition_penalty != 1:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(hf.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(hf.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(hf.MinPLogitsWarper(params.min_p))
    scores = torch.from_numpy(logits).double()[None]
    for step in steps:
        scores = step(torch.tensor([list(history)]), scores)
    return scores.softmax(dim=-1)[0].numpy()


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_distribution_is_that_of_transformers(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(11)
    for vocab, repetition_penalty in itertools.product((5, 40, 1000), (1.0, 1.3)):
        params = Params(**settings, repetition_penalty=repetition_penalty)
        logits = random_logits(rng, 1, vocab)[0]
        prompt, output = rng.integers(0, vocab, (2, 7)).tolist()
        expected = warped(logits, params, prompt + output)
        found = probabilities(logits, params, prompt, output)
        # Below 2^-44 of the largest probability a token cannot occur.
        assert ((found > 0) == (expected > 2.0**-44 * expected.max())).all()
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_penalties_count_as_openai_defines_them() -> None:
    logits = np.array([2, 2, 2, -2, -2], dtype=np.float32)
    params = Params(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    # Token 0 is unseen; 1 and 3 stand in the prompt only; 2 and 4 in the output, twice and once.
    penalised = np.array([2, 1, 1 - 0.5 - 2 * 0.25, -4, -4 - 0.5 - 0.25])
    expected = np.exp(penalised) / np.exp(penalised).sum()
    np.testing.assert_allclose(probabilities(logits, params, [1, 3, 1, 99], [2, 4, 2]), expected, rtol=1e-6)
    logits = np.array([[9, 0, 0, 0], [9, 8, 0, 0], [9, 8, 7, 0]], dtype=np.float32)
    params = Params(temperature=0, frequency_penalty=1.5)
    assert verify(logits, [0, 1], params) == [0, 1, 0]
    assert verify(logits, [0, 1], params, 2, [3], [0, 0]) == [0, 1, 2]
    drawn = native(replace(params, temperature=0.01)), 0, ids(()), ids(()), np.array([[0], [1]]), np.ones((2, 1))
    assert _C.verify_block(logits, [0, 1], *drawn) == [0, 1, 0]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 2}, 4), ({"top_k": 1}, 1), ({"top_k": 4}, 4), ({"top_p": 0.5}, 4), ({"top_p": 0.3}, 1)],
)
def test_equal_logits_stay_or_go_together(filters: dict[str, Any], kept: int) -> None:
    """Token 3 has 2/5 of the mass, tokens 0, 1 and 2 have 1/5 each, and token 4 has next to none."""
    logits = np.array([0, 0, 0, math.log(2), -20], dtype=np.float32)
    expected = [0, 0, 0, 1, 0] if kept == 1 else [0.2, 0.2, 0.2, 0.4, 0]
    np.testing.assert_allclose(probabilities(logits, Params(**filters)), expected, atol=1e-7)


def test_top_p_is_of_what_top_k_leaves_and_min_p_comes_last() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], dtype=np.float32))
    # Over all tokens 0.4 + 0.3 < 0.75, so three remain; over the first three 0.7 / 0.9 > 0.75, so two do.
    np.testing.assert_allclose(probabilities(logits, Params(top_p=0.75)), [4 / 9, 3 / 9, 2 / 9, 0], atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, Params(top_p=0.75, top_k=3)), [4 / 7, 3 / 7, 0, 0], atol=1e-6)
    # Removing the tail by min-p first would leave the nucleus one token shorter.
    np.testing.assert_allclose(
        probabilities(logits, Params(top_p=0.75, min_p=0.4)), [4 / 9, 3 / 9, 2 / 9, 0], atol=1e-6
    )


@given(st.integers(0, 2**64 - 1), st.integers(1, 40), st.booleans())
def test_temperature_0_and_top_k_1_are_the_argmax(seed: int, vocab: int, ties: bool) -> None:
    logits = random_logits(np.random.default_rng(seed), 3, vocab)
    if ties:
        logits = np.round(logits)
    best = torch.from_numpy(logits).argmax(dim=-1).tolist()
    assert verify(logits, best[:2], Params(temperature=0, seed=seed)) == best
    assert probabilities(logits[0], Params(temperature=0))[best[0]] == 1
    is_tied = (logits == logits.max(axis=1, keepdims=True)).sum(axis=1) > 1
    if not is_tied.any():
        assert verify(logits, best[:2], Params(top_k=1, seed=seed)) == best


@examples(max_examples=30)
@given(st.data())
def test_the_output_does_not_depend_on_the_proposals(data: st.DataObject) -> None:
    """A target whose logits are a function of everything before, decoded plainly and in blocks."""
    vocab, length = 6, 24
    seed = data.draw(st.integers(0, 2**64 - 1))
    params = Params(temperature=1.2, top_p=0.9, seed=seed, **data.draw(st.sampled_from([{}, *PENALTIES])))
    prompt = [1, 2]

    def target(output: Sequence[int]) -> Logits:
        return random_logits(np.random.default_rng([seed % 2**32, *output]), 1, vocab, scale=1.0)[0]

    plain: list[int] = []
    while len(plain) < length:
        plain += verify(target(plain)[None], [], params, len(plain), prompt, plain)
    output: list[int] = []
    while len(output) < length:
        proposals = data.draw(st.lists(st.integers(0, vocab - 1), max_size=4))
        if data.draw(st.booleans()):  # a drafter that knows what comes
            proposals = plain[len(output) : len(output) + 4]
        rows = np.stack([target([*output, *proposals[:k]]) for k in range(len(proposals) + 1)])
        emitted = verify(rows, proposals, params, len(output), prompt, output)
        assert emitted[:-1] == proposals[: len(emitted) - 1]
        assert len(emitted) == len(proposals) + 1 or emitted[-1] != proposals[len(emitted) - 1]
        output += emitted
    assert output[:length] == plain


def test_seed_and_position_choose_the_token() -> None:
    logits = np.zeros((1, 1000), dtype=np.float32)
    tokens = [verify(logits, [], Params(seed=seed), position)[0] for seed in range(8) for position in range(8)]
    assert tokens == [verify(logits, [], Params(seed=seed), position)[0] for seed in range(8) for position in range(8)]
    assert len(set(tokens)) > 55  # 64 draws from 1000
    high = [verify(logits, [], Params(seed=seed), position)[0] for seed, position in [(2**63, 0), (0, 2**40)]]
    assert len({tokens[0], *high}) == 3
    logits = np.zeros((1, 8), dtype=np.float32)
    params = native(Params(seed=3))
    tokens = np.array([_C.verify_block(logits, [], params, position)[0] for position in range(40_000)])
    pairs = np.bincount(tokens[:-1] * 8 + tokens[1:], minlength=64)
    expected = len(tokens[1:]) / 64
    chi_square = ((pairs - expected) ** 2 / expected).sum()
    assert 30 < chi_square < 110  # 63 degrees of freedom


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e300])
def test_extreme_temperatures(temperature: float) -> None:
    logits = np.array([0, 3, 3, -np.inf, 2.9], dtype=np.float32)
    expected = [0.25, 0.25, 0.25, 0, 0.25] if temperature > 1 else [0, 0.5, 0.5, 0, 0]
    np.testing.assert_allclose(probabilities(logits, Params(temperature=temperature)), expected, atol=1e-12)


def test_weights_large_vocabularies_and_logprobs() -> None:
    logits = np.linspace(-32, 0, 50_001, dtype=np.float32)
    found = probabilities(logits, Params())
    weights = np.rint(2.0**43 * found / found[-1])
    expected = np.rint(2.0**43 * np.exp(logits.astype(np.float64)))
    assert abs(weights - expected).max() <= 1
    assert (weights == expected).mean() > 0.98
    logits = random_logits(np.random.default_rng(5), 1, 201_088)[0]
    expected = warped(logits, Params(top_p=0.95), [])
    np.testing.assert_allclose(probabilities(logits, Params(top_p=0.95)), expected, rtol=1e-4, atol=1e-15)
    logits = random_logits(np.random.default_rng(2), 3, 500, scale=6.0)
    logits[1, 7] = -np.inf
    expected = torch.from_numpy(logits).double().log_softmax(dim=-1).numpy()
    found = _C.token_logprobs(logits, [4, 7])
    np.testing.assert_allclose(found, [expected[0, 4], -np.inf], rtol=1e-9)


def test_threads_do_not_meet() -> None:
    rng = np.random.default_rng(9)
    cases = [
        (random_logits(rng, 1, vocab), Params(top_p=0.9, frequency_penalty=0.5, seed=vocab))
        for vocab in range(50, 5000, 50)
    ]
    history = [1, 2, 3]

    def token(case: tuple[Logits, Params]) -> list[int]:
        return verify(case[0], [], case[1], len(history), history, history)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(token, cases * 10)) == [token(case) for case in cases] * 10
