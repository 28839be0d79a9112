# SPDX-License-Identifier: Apache-2.0
"""Expected acceptance at a temperature: exact where all is recorded, bounds where not, and that of real decoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_trt.measure.replay import replay
from dflash_trt.measure.sampled_acceptance import Distributions, prompt_sums, sums_of_steps
from dflash_trt.quantize.features import AnswerLogprobs, open_features
from dflash_trt.runtime.request import Step
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.session import Session
from tests.decoding import decode
from tests.quantize.feature_samples import capture

VOCABULARY, NUM_DRAFTS = 5, 3
PROPOSALS = (0, 3, 1)


def logits(prefix: tuple[int, ...]) -> np.ndarray:
    """A target that looks at all tokens before; its likeliest ones are among the proposals often enough."""
    generator = np.random.default_rng([7, *prefix])
    return 2 * generator.standard_normal(VOCABULARY) + 1.5 * (np.arange(VOCABULARY) == PROPOSALS[len(prefix)])


def distribution(prefix: tuple[int, ...], T: float) -> np.ndarray:
    values = logits(prefix)
    if T == 0:
        return np.eye(VOCABULARY)[values.argmax()]
    weights = np.exp((values - values.max()) / T)
    return weights / weights.sum()


def recorded(text: tuple[int, ...], T: float, top_logprobs: int) -> Distributions:
    """What `capture` would have written of `text`; one place more stands for the prefill's token."""
    rows = [np.log(distribution(text[:k], 1.0)) for k in range(NUM_DRAFTS)]
    values = torch.tensor(np.array([rows[0], *rows]))
    answer = [0, *text]
    top = values.topk(top_logprobs)
    kept = AnswerLogprobs(
        own=values.gather(-1, torch.tensor(answer)[:, None])[:, 0].float(),
        top_token_ids=top.indices.int(),
        top=top.values.float(),
        tail_mass=(1 - top.values.exp().sum(-1)).clamp(min=0).float(),
        log_normaliser=(values / T).logsumexp(-1).float() if T else None,
    )
    return Distributions(kept, answer, VOCABULARY, T)


def texts(T: float) -> Iterator[tuple[tuple[int, ...], float]]:
    """All texts, and how probable each is."""
    for text in itertools.product(range(VOCABULARY), repeat=NUM_DRAFTS):
        share = math.prod(float(distribution(text[:k], T)[text[k]]) for k in range(NUM_DRAFTS))
        if share:
            yield text, share


def step(text: Sequence[int]) -> Step:
    accepted = next((k for k, pair in enumerate(zip(text, PROPOSALS, strict=True)) if len(set(pair)) > 1), NUM_DRAFTS)
    return Step(token_ids=[*text[:accepted], 99], proposals=PROPOSALS, accepted=accepted)


def estimated(T: float, written: float, top_logprobs: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean of both bounds over all texts of temperature `written`, by position."""
    low, high = np.zeros(NUM_DRAFTS), np.zeros(NUM_DRAFTS)
    for text, share in texts(written):
        sums = sums_of_steps([step(text)], recorded(text, written, top_logprobs), T, NUM_DRAFTS)
        low += share * sums.bounds[0]
        high += share * sums.bounds[1]
    return low, high


def truth(T: float) -> np.ndarray:
    """p_T(d_1) ... p_T(d_k) by position."""
    return np.cumprod([distribution(PROPOSALS[:k], T)[PROPOSALS[k]] for k in range(NUM_DRAFTS)])


@pytest.mark.parametrize("top_logprobs", [VOCABULARY, 3, 1])
@pytest.mark.parametrize(("T", "written"), [(1, 1), (0.6, 0.6), (0.5, 1), (1.5, 0.7), (0.8, 0), (2, 0)])
def test_the_mean_over_all_texts(T: float, written: float, top_logprobs: int) -> None:
    """Equal to the truth for text of that temperature, and of another one with all tokens recorded; else within."""
    low, high = estimated(T, written, top_logprobs)
    assert (low <= truth(T) + 1e-6).all()
    assert (high >= truth(T) - 1e-6).all()
    if written == T or (top_logprobs == VOCABULARY and written):
        assert low == pytest.approx(truth(T), abs=1e-6)
        assert high == pytest.approx(truth(T), abs=1e-6)
    elif top_logprobs == 1:
        assert (high > low + 1e-3).any(), "nothing can be so sure of it"


def test_nothing_behind_a_stop_token_was_judged() -> None:
    cut = Step(token_ids=[0], proposals=PROPOSALS, accepted=1)
    sums = sums_of_steps([cut], recorded((0, 3, 1), 1, VOCABULARY), 1, NUM_DRAFTS)
    assert sums.judged.tolist() == [1, 0, 0]
    assert sums.bounds[0].tolist() == [pytest.approx(truth(1)[0]), 0, 0]


def surplus(sessions: dict[str, Session], name: str, file: Path, T: float) -> list[float]:
    """By prompt: drafts that decoding with the target accepted, less those that were expected in the same passes.

    One prompt may have been drawn within rounding of a boundary, which another batch moves (docs/sampling.md).
    """
    moved = []
    session = sessions[name]
    with open_features(file, session.manifest.draft) as features:
        replays = replay(features, session.drafter)
        for i, replayed in enumerate(replays):
            params = SamplingParams(
                max_tokens=features.facts.max_tokens, temperature=T, seed=features.facts.sampler_seed(i)
            )
            live = decode(session, features.prompt(i).tolist(), params)
            if live.token_ids == features.answer(i)[0].tolist():
                assert live.steps == replayed.steps, f"sequence {i}"
            else:
                moved.append(i)
        assert len(moved) <= 1
        sums = prompt_sums(features, replays, T, session.drafter.spec.num_draft_tokens)
    for prompt in sums:
        assert (prompt.bounds[0] == prompt.bounds[1]).all(), "its own temperature leaves nothing open"
    return [
        sum(step.accepted for step in replayed.steps) - prompt.bounds[0].sum()
        for replayed, prompt in zip(replays, sums, strict=True)
    ]


def check(surpluses: Sequence[float]) -> None:
    """Their mean is 0 within 4 standard errors: 1 run in 16,000 would fail by chance, and the seeds are fixed."""
    error = float(np.std(surpluses, ddof=1)) / len(surpluses) ** 0.5
    assert abs(float(np.mean(surpluses))) < 4 * error


def test_sampled_text_replays_as_it_was_decoded(sessions: dict[str, Session], tmp_path: Path) -> None:
    """With the same seeds the same tokens in the same steps, and as many accepted as expected."""
    options = ("--max-prompts", 8, "--max-tokens", 24, "--temperature", 0.8, "--seed", 5, "--top-logprobs", 8)
    file = capture("tiny-qwen3", tmp_path / "f.safetensors", *options)
    check(surplus(sessions, "tiny-qwen3", file, 0.8))


@pytest.mark.full
@pytest.mark.parametrize("T", [0.5, 1.0])
@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-qwen3"])
def test_expected_acceptance_is_that_of_many_seeds(
    name: str, T: float, sessions: dict[str, Session], tmp_path: Path
) -> None:
    options = ("--max-tokens", 96, "--temperature", T, "--top-logprobs", 8)
    surpluses = []
    for seed in range(0, 200, 50):
        file = capture(name, tmp_path / f"{seed}.safetensors", *options, "--seed", seed)
        surpluses += surplus(sessions, name, file, T)
    check(surpluses)
