# SPDX-License-Identifier: Apache-2.0
"""Decoding with drafts whose candidates depend on each other: plain tokens, in fewer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.candidate_lattice import CandidateLattice
from dflash_trt.engine.candidate_scorer import MarkovScorer
from dflash_trt.engine.proposals import Draw
from dflash_trt.errors import BuildError
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.policy import proposal_choice
from dflash_trt.runtime.policy.draft_length import FixedLength
from dflash_trt.runtime.policy.proposal_choice import ProposalChoice
from dflash_trt.runtime.session import Session, run
from tests.checkpoint.samples import edit_config, edit_tensors
from tests.decoding import open_trained
from tests.engines import build, build_with_head
from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.reference.synthetic import DraftSizes, write_random_draft

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash2", FIXTURES / "tiny-qwen3"
LILICORR = FIXTURES / "tiny-qwen3-lilicorr"


def opened(draft: Path, engine: Path) -> Session:
    build(draft, engine, TARGET)
    return open_trained(TARGET.name, engine, max_batch_size=4)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return opened(DRAFT, tmp_path_factory.mktemp("dflash2") / "engine")


@pytest.fixture(scope="module")
def lilicorr(tmp_path_factory: pytest.TempPathFactory) -> Session:
    return opened(LILICORR, tmp_path_factory.mktemp("lilicorr") / "engine")


@cache
def plain(params: SamplingParams, count: int) -> list[list[int]]:
    """Answers to the first prompts by the target alone, four at once."""
    session = open_trained(TARGET.name, max_batch_size=4)
    requests = [session.request(prompt, params) for prompt in prompts(session)[:count]]
    return [answer.token_ids for answer in run(session.plain_decoder(), requests)]


def steps(session: Session, params: SamplingParams, count: int) -> int:
    """Verify steps over the first prompts, four at once; every answer is plain decoding's."""
    drafted = run(session.decoder(), [session.request(prompt, params) for prompt in prompts(session)[:count]])
    assert [answer.token_ids for answer in drafted] == plain(params, count)
    return sum(answer.steps or 0 for answer in drafted)


@pytest.mark.parametrize("kind", ["session", "lilicorr"])
def test_greedy_answers_are_plain_ones_in_fewer_steps_than_dflash(
    kind: str, sessions: dict[str, Session], request: pytest.FixtureRequest
) -> None:
    session, greedy = request.getfixturevalue(kind), SamplingParams(max_tokens=48)
    dflash = [sessions["tiny-qwen3"].generate(prompt, greedy).steps or 0 for prompt in prompts(session)[:4]]
    assert steps(session, greedy, 4) < sum(dflash)


@pytest.mark.parametrize("kind", ["session", "lilicorr"])
def test_sampled_answers_are_plain_ones(kind: str, request: pytest.FixtureRequest) -> None:
    """Tokens are drawn with the random number of their position, whatever was proposed there."""
    session = request.getfixturevalue(kind)
    assert steps(session, SamplingParams(max_tokens=32, temperature=0.8, seed=11), 2) < 2 * 31


@pytest.mark.full
def test_paths_that_a_correlator_draws_leave_the_distribution(
    lilicorr: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProposalChoice, "is_drawn", lambda *_: True)
    plain = drawn(lilicorr, lilicorr.plain_decoder(), max_tokens=5, first_seed=0)
    assert same_distribution(drawn(lilicorr, lilicorr.decoder(), max_tokens=5), plain) > 1e-3


def test_a_correlators_head_of_its_own(lilicorr: Session, tmp_path: Path) -> None:
    """The draft graph then returns log probabilities; a head without some tokens has none of the vocabulary's."""
    own = open_trained(TARGET.name, build_with_head(LILICORR, TARGET, tmp_path, None), max_batch_size=4)
    greedy = SamplingParams(max_tokens=32)
    assert steps(own, greedy, 2) == steps(lilicorr, greedy, 2)
    with pytest.raises(BuildError, match="a LiLiCorr draft needs probabilities over the whole vocabulary"):
        build_with_head(LILICORR, TARGET, tmp_path / "trimmed")


def drawn(
    session: Session, decoder: Decoder, *, max_tokens: int, first_seed: int = 5000, count: int = 1200
) -> Counter[tuple[int, ...]]:
    """`count` answers of `max_tokens` tokens to requests without a seed."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.8, top_k=3)
    requests = []
    for seed in range(first_seed, first_seed + count):
        requests.append(session.request(prompts(session)[3], params))
        requests[-1].sampler = replace(params, seed=seed).sampler()
    return Counter(tuple(answer.token_ids) for answer in run(decoder, requests))


@pytest.mark.full
def test_drawn_proposals_leave_the_distribution(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chi-square test of two samples; it sees distributions that are those of the next slots."""
    monkeypatch.setattr(ProposalChoice, "is_drawn", lambda *_: True)
    plain = drawn(session, session.plain_decoder(), max_tokens=5, first_seed=0)
    assert same_distribution(drawn(session, session.decoder(), max_tokens=5), plain) > 1e-3
    honest = CandidateLattice.sampled_walk

    def mistaken(self: CandidateLattice, *draw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        paths, q = honest(self, *draw)
        return paths, q.roll(1, dims=1)

    monkeypatch.setattr(CandidateLattice, "sampled_walk", mistaken)
    assert same_distribution(drawn(session, session.decoder(), max_tokens=5), plain) < 1e-6


@pytest.mark.full
def test_choosing_between_ways_leaves_the_distribution(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are greedy or drawn in turn; the test sees a choice that looks at what was drawn."""
    plain = drawn(session, session.plain_decoder(), max_tokens=5, first_seed=0)
    monkeypatch.setattr(proposal_choice, "ENOUGH", 10**9)
    assert same_distribution(drawn(session, session.decoder(), max_tokens=5), plain) > 1e-3
    honest = CandidateLattice.sampled_walk

    def looking(self: CandidateLattice, *draw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        paths, q = honest(self, *draw)
        greedy = self.greedy_walk()
        return torch.where(paths[:, :1] == greedy[:, :1], paths, greedy), q

    monkeypatch.setattr(ProposalChoice, "is_drawn", lambda *_: True)
    monkeypatch.setattr(CandidateLattice, "sampled_walk", looking)
    assert same_distribution(drawn(session, session.decoder(), max_tokens=5), plain) < 1e-6


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


@pytest.mark.parametrize("rows", [pytest.param(None, marks=pytest.mark.full), 400])
def test_a_head_of_its_own(rows: int | None, session: Session, tmp_path: Path) -> None:
    """A copy of the head proposes the same; of a trimmed one, candidates and codebooks meet by the target's ids."""
    token_ids = None if rows is None else np.sort(np.random.default_rng(0).permutation(1024)[:rows])
    engine = build_with_head(DRAFT, TARGET, tmp_path, token_ids)
    own, greedy = open_trained(TARGET.name, engine, max_batch_size=4), SamplingParams(max_tokens=32)
    whole, found = steps(session, greedy, 2), steps(own, greedy, 2)
    assert found == whole if rows is None else whole <= found < 2 * 31
    proposals = {token for step in _steps(own) for token in step}
    assert token_ids is None or proposals <= set(token_ids.tolist())


def _steps(session: Session) -> list[tuple[int, ...]]:
    request = session.request(prompts(session)[0], SamplingParams(max_tokens=32))
    run(session.decoder(), [request])
    return [step.proposals for step in request.steps]


SIZES = DraftSizes(
    hidden=128, vocab_size=1024, num_target_layers=4, block_size=7, num_heads=4, num_kv_heads=2, head_dim=64
)
RANK = 32


class Cutting(FixedLength):
    """Whole blocks, cut where the drafter gives up."""

    num_cut = 0

    def cut_length(self, survival: Sequence[float]) -> int:
        count = sum(share >= 0.4 for share in survival)
        self.num_cut += len(survival) - count
        return count


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory, session: Session) -> Session:
    """The lm_head is trimmed to the commonest tokens, so that all of them are candidates."""
    work = tmp_path_factory.mktemp("dspark")
    draft = write_random_draft(work / "random", dialect="qwen3", dspark="vanilla", sizes=SIZES, dtype=torch.float32)
    asked = [*prompts(session)[:6], *[prompts(session)[3]] * 10]
    settings = [SamplingParams(max_tokens=48, temperature=0.8, top_k=3, seed=seed) for seed in range(len(asked))]
    requests = [session.request(*request) for request in zip(asked, settings, strict=True)]
    answers = [answer.token_ids for answer in run(session.plain_decoder(), requests)]
    common = sorted(token for token, _ in Counter(t for answer in answers for t in answer).most_common(RANK))
    plant(draft, common, answers)
    edit_config(draft, markov_rank=RANK, target_layer_ids=[0, 1, 2])
    engine = build_with_head(draft, TARGET, work, common)
    return open_trained(TARGET.name, engine, max_batch_size=4)


def plant(draft: Path, common: list[int], answers: list[list[int]]) -> None:
    """Heads that say which of `common` follows each of them in `answers`, and how surely."""
    counts = torch.full((RANK, RANK), 1e-3)
    for before, after in (pair for answer in answers for pair in pairwise(answer)):
        if before in common and after in common:
            counts[common.index(before), common.index(after)] += 1
    shares = counts / counts.sum(1, keepdim=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        w1, w2 = torch.zeros(2, SIZES.vocab_size, RANK)
        w1[common], w2[common] = torch.eye(RANK), shares.log().T
        confidence = torch.cat([torch.zeros(SIZES.hidden), shares.amax(1).logit()])
        tensors |= {
            "norm.weight": 0.02 * tensors["norm.weight"],  # hidden rows hardly count
            "markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2,
            "confidence_head.proj.weight": confidence[None], "confidence_head.proj.bias": torch.zeros(1),
        }  # fmt: skip

    edit_tensors(draft, change)


def test_answers_are_plain_ones_in_fewer_steps(dspark: Session) -> None:
    assert dspark.manifest.draft.num_draft_tokens == SIZES.block_size
    assert steps(dspark, SamplingParams(max_tokens=32), 2) < 0.8 * 2 * 31
    assert steps(dspark, SamplingParams(max_tokens=32, temperature=0.8, seed=11), 2) < 2 * 31


def test_confidence_cuts_drafts_and_changes_no_answer(dspark: Session) -> None:
    params = SamplingParams(max_tokens=48)
    whole, cut = ([dspark.request(p, params) for p in prompts(dspark)[:4]] for _ in range(2))
    expected = run(dspark.decoder(), whole)
    policy = Cutting(SIZES.block_size)
    answers = run(dspark.decoder(policy), cut)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    rejected = [sum(step.proposed - step.accepted for r in rs for step in r.steps) for rs in (whole, cut)]
    assert policy.num_cut > 0
    assert rejected[1] < 0.7 * rejected[0]


def test_a_length_that_is_asked_for_is_not_cut(dspark: Session) -> None:
    policy = Cutting(SIZES.block_size)
    params = SamplingParams(max_tokens=48, draft_length=SIZES.block_size)
    run(dspark.decoder(policy), [dspark.request(p, params) for p in prompts(dspark)[:4]])
    assert policy.num_cut == 0


@pytest.mark.full
def test_cut_drawn_drafts_leave_the_distribution(dspark: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees a cut that depends on the token itself."""
    monkeypatch.setattr(ProposalChoice, "is_drawn", lambda *_: True)
    plain = drawn(dspark, dspark.plain_decoder(), max_tokens=4, first_seed=0)
    assert same_distribution(drawn(dspark, dspark.decoder(Cutting(SIZES.block_size)), max_tokens=4), plain) > 1e-3
    monkeypatch.setattr(MarkovScorer, "_survival", lambda *inputs: (inputs[-1] > 300).cumprod(-1))
    assert same_distribution(drawn(dspark, dspark.decoder(Cutting(SIZES.block_size)), max_tokens=4), plain) < 1e-6
