# SPDX-License-Identifier: Apache-2.0
"""Decoding with a DSpark draft whose heads know the target's bigrams: the target's own tokens, in fewer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.draft_length import FixedLength
from dflash_trt.runtime.drafter.markov_head import MarkovScorer
from dflash_trt.runtime.session import Session, open_session, run
from tests.checkpoint.samples import edit_config, edit_tensors
from tests.engines import build_with_head
from tests.fixtures_data import prompts
from tests.paths import FIXTURES
from tests.reference.synthetic import DraftSizes, write_random_draft
from tests.runtime.test_dflash2_decode import same_distribution, steps

TARGET = FIXTURES / "tiny-qwen3"
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
def session(tmp_path_factory: pytest.TempPathFactory, sessions: dict[str, Session]) -> Session:
    """The lm_head is trimmed to the commonest tokens, so that all of them are candidates."""
    work = tmp_path_factory.mktemp("dspark")
    draft = write_random_draft(work / "random", dialect="qwen3", dspark="vanilla", sizes=SIZES, dtype=torch.float32)
    text = sessions["tiny-qwen3"]
    asked = [*prompts(text)[:6], *[prompts(text)[3]] * 20]
    settings = [SamplingParams(max_tokens=48, temperature=0.8, top_k=3, seed=seed) for seed in range(len(asked))]
    answers = [text.generate_plain(*request).token_ids for request in zip(asked, settings, strict=True)]
    common = sorted(token for token, _ in Counter(t for answer in answers for t in answer).most_common(RANK))
    plant(draft, common, answers)
    edit_config(draft, markov_rank=RANK, target_layer_ids=[0, 1, 2])
    engine = build_with_head(draft, TARGET, work, common)
    return open_session(engine, str(TARGET), RuntimeOptions(max_batch_size=4))


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


def test_answers_are_plain_ones_in_fewer_steps(session: Session) -> None:
    assert session.manifest.draft.num_draft_tokens == SIZES.block_size
    assert steps(session, SamplingParams(max_tokens=48), 4) < 0.8 * 4 * 47
    assert steps(session, SamplingParams(max_tokens=48, temperature=0.8, seed=11), 4) < 4 * 47


def test_confidence_cuts_drafts_and_changes_no_answer(session: Session) -> None:
    params = SamplingParams(max_tokens=48)
    whole, cut = ([session.request(p, params) for p in prompts(session)[:4]] for _ in range(2))
    expected = run(session.decoder(), whole)
    policy = Cutting(SIZES.block_size)
    answers = run(session.decoder(policy), cut)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    rejected = [sum(step.proposed - step.accepted for r in rs for step in r.steps) for rs in (whole, cut)]
    assert policy.num_cut > 0
    assert rejected[1] < 0.7 * rejected[0]


def test_a_length_that_is_asked_for_is_not_cut(session: Session) -> None:
    policy = Cutting(SIZES.block_size)
    params = SamplingParams(max_tokens=48, draft_length=SIZES.block_size)
    run(session.decoder(policy), [session.request(p, params) for p in prompts(session)[:4]])
    assert policy.num_cut == 0


def drawn(session: Session, *, drafting: bool, first_seed: int, count: int = 1200) -> Counter[tuple[int, ...]]:
    """Answers of four tokens to requests that give no seed, with drafts cut by confidence."""
    requests = []
    for seed in range(first_seed, first_seed + count):
        requests.append(session.request(prompts(session)[3], SamplingParams(max_tokens=4, temperature=0.8, top_k=3)))
        requests[-1].sampler = SamplingParams(temperature=0.8, top_k=3, seed=seed).sampler()
    decoder = session.decoder(Cutting(SIZES.block_size)) if drafting else session.plain_decoder()
    return Counter(tuple(answer.token_ids) for answer in run(decoder, requests))


@pytest.mark.full
def test_cut_drawn_drafts_leave_the_distribution(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees a cut that depends on the token itself."""
    plain = drawn(session, drafting=False, first_seed=0)
    assert same_distribution(drawn(session, drafting=True, first_seed=5000), plain) > 1e-3
    monkeypatch.setattr(MarkovScorer, "_survival", lambda *inputs: (inputs[-1] > 300).cumprod(-1))
    assert same_distribution(drawn(session, drafting=True, first_seed=5000), plain) < 1e-6
