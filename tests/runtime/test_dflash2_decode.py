# SPDX-License-Identifier: Apache-2.0
"""Decoding with the trained DFlash2 draft: the target's own tokens, in fewer steps than with DFlash."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.drafter.candidate_selector import Candidates
from dflash_trt.runtime.drafter.proposals import Draw
from dflash_trt.runtime.session import Session, open_session, run
from tests.engines import build, build_with_head
from tests.fixtures_data import prompts
from tests.paths import FIXTURES

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash2", FIXTURES / "tiny-qwen3"
OPTIONS = RuntimeOptions(max_batch_size=4)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    engine = tmp_path_factory.mktemp("dflash2") / "engine"
    build(DRAFT, engine, TARGET)
    return open_session(engine, str(TARGET), OPTIONS)


def steps(session: Session, params: SamplingParams, count: int) -> int:
    """Verify steps over the first prompts, four at once; every answer is plain decoding's."""
    asked = prompts(session)[:count]
    plain = run(session.plain_decoder(), [session.request(prompt, params) for prompt in asked])
    drafted = run(session.decoder(), [session.request(prompt, params) for prompt in asked])
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    return sum(answer.steps or 0 for answer in drafted)


def test_greedy_answers_are_plain_ones_in_fewer_steps_than_dflash(
    session: Session, sessions: dict[str, Session]
) -> None:
    greedy = SamplingParams(max_tokens=64)
    dflash = [sessions["tiny-qwen3"].generate(prompt, greedy).steps or 0 for prompt in prompts(session)[:6]]
    assert steps(session, greedy, 6) < sum(dflash)


def test_sampled_answers_are_plain_ones(session: Session) -> None:
    """Tokens are drawn with the random number of their position, whatever was proposed there."""
    assert steps(session, SamplingParams(max_tokens=48, temperature=0.8, seed=11), 4) < 4 * 47


def drawn(session: Session, *, drafting: bool, first_seed: int, count: int = 1200) -> Counter[tuple[int, ...]]:
    """Answers of five tokens, `count` times, to requests that give no seed."""
    params = SamplingParams(max_tokens=5, temperature=0.8, top_k=3)
    requests = []
    for seed in range(first_seed, first_seed + count):
        requests.append(session.request(prompts(session)[3], params))
        requests[-1].sampler = replace(params, seed=seed).sampler()
    decoder = session.decoder() if drafting else session.plain_decoder()
    return Counter(tuple(answer.token_ids) for answer in run(decoder, requests))


@pytest.mark.full
def test_drawn_proposals_leave_the_distribution(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chi-square test of two samples; it sees distributions that are those of the next slots."""
    plain = drawn(session, drafting=False, first_seed=0)
    assert same_distribution(drawn(session, drafting=True, first_seed=5000), plain) > 1e-3
    honest = Candidates.sampled_walk

    def mistaken(self: Candidates, *draw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        paths, q = honest(self, *draw)
        return paths, q.roll(1, dims=1)

    monkeypatch.setattr(Candidates, "sampled_walk", mistaken)
    assert same_distribution(drawn(session, drafting=True, first_seed=5000), plain) < 1e-6


def same_distribution(first: Counter[tuple[int, ...]], second: Counter[tuple[int, ...]]) -> float:
    """The p-value of Pearson's test that both samples are of one distribution; rare outcomes are one."""
    common = [outcome for outcome in first | second if first[outcome] + second[outcome] >= 20]
    observed = torch.tensor([[sample[outcome] for outcome in common] for sample in (first, second)]).double()
    sizes = torch.tensor([[first.total()], [second.total()]])
    observed = torch.cat([observed, sizes - observed.sum(1, keepdim=True)], dim=1)
    observed = observed[:, observed.sum(0) > 0]
    expected = sizes * observed.sum(0) / sizes.sum()
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((observed.shape[1] - 1) / 2).double(), statistic / 2))


def test_a_seed_promises_plain_tokens(session: Session) -> None:
    """Beside requests without one, whose proposals are drawn."""
    settings = (SamplingParams(max_tokens=32), SamplingParams(max_tokens=32, temperature=0.8, seed=0))
    free = SamplingParams(max_tokens=32, temperature=0.8, logprobs=True)
    requests = [session.request(prompts(session)[1], params) for params in (*settings, free, free)]
    assert [request.draw for request in requests] == [None, None, *(Draw(r.sampler, position=0) for r in requests[2:])]
    answers = run(session.decoder(), requests)
    for answer, params in zip(answers, settings, strict=False):
        plain = run(session.plain_decoder(), [session.request(prompts(session)[1], params)])
        assert answer.token_ids == plain[0].token_ids
    assert [len(answer.logprobs or ()) for answer in answers[2:]] == [len(answer.token_ids) for answer in answers[2:]]


@pytest.mark.parametrize("rows", [None, 400])
def test_a_head_of_its_own(rows: int | None, session: Session, tmp_path: Path) -> None:
    """A copy of the head proposes the same; of a trimmed one, candidates and codebooks meet by the target's ids."""
    token_ids = None if rows is None else np.sort(np.random.default_rng(0).permutation(1024)[:rows])
    engine = build_with_head(DRAFT, TARGET, tmp_path, token_ids)
    own, greedy = open_session(engine, str(TARGET), OPTIONS), SamplingParams(max_tokens=32)
    whole = steps(session, greedy, 4)
    assert steps(own, greedy, 4) == whole if rows is None else whole <= steps(own, greedy, 4) < 4 * 31
    proposals = {token for step in _steps(own) for token in step}
    assert token_ids is None or proposals <= set(token_ids.tolist())


def _steps(session: Session) -> list[tuple[int, ...]]:
    request = session.request(prompts(session)[0], SamplingParams(max_tokens=32))
    run(session.decoder(), [request])
    return [step.proposals for step in request.steps]
