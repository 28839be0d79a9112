# SPDX-License-Identifier: Apache-2.0
"""The decode loop against three independent ones: plain greedy decoding, the definition, transformers.

Acceptance must agree too: most mistakes in a drafter leave the text right and only cost steps.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import EngineError
from dflash_trt.runtime.accept import accept_parts
from dflash_trt.runtime.answer import completion
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.drafter.drafter import argmax
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.policy.draft_length import FixedLength
from dflash_trt.runtime.policy.step_record import StepRecord
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.session import Session, run
from dflash_trt.runtime.step_input import NO_PROPOSALS, StepInput
from dflash_trt.runtime.targets.target import Verified
from tests.checkpoint.samples import edit_config
from tests.decoding import decode, greedy, open_trained, open_without_tokenizer
from tests.engines import build
from tests.fixtures_data import PAIRS, prompts
from tests.oracle.random_pairs import write_random_pair
from tests.oracle.transformers_dflash import dflash_greedy, load_assistant, load_target, plain_greedy
from tests.paths import FIXTURES
from tests.reference.decode_loop import reference_greedy
from tests.reference.synthetic import Dialect

BAD = 7
"""Token whose embedding is NaN, which makes all that follows it NaN."""
PROMPTS = [list(range(20, 30)), list(range(40, 90)), [*range(20, 25), BAD, *range(30, 40)], list(range(100, 103))]
PARAMS = [
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=1.0, seed=3),
    SamplingParams(max_tokens=12, repetition_penalty=1.1, logprobs=True),
]


@pytest.fixture(scope="module")
def session() -> Session:
    """Two slots: those that come later take the slot that NaN was in."""
    session = open_trained("tiny-qwen3", max_batch_size=2)
    with torch.no_grad():
        session.target.model.get_input_embeddings().weight[BAD] = float("nan")
    return session


def step_to_the_end(session: Session, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
    requests = [session.request(prompt, params) for prompt in prompts]
    decoder = session.decoder(prefill_chunk=16)
    decoder.run(requests)
    assert decoder.metrics().finished.get(FinishReason.ERROR, 0) == sum(BAD in prompt for prompt in prompts)
    assert decoder.slots.free_slots == 2
    return requests


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "penalised"])
def test_only_the_request_that_meets_nan_ends(session: Session, params: SamplingParams) -> None:
    expected = [alone for p in PROMPTS if BAD not in p for alone in step_to_the_end(session, [p], params)]
    requests = step_to_the_end(session, [PROMPTS[2], *PROMPTS, *PROMPTS], params)
    bad = [request for request in requests if BAD in request.prompt_ids]
    good = [request for request in requests if BAD not in request.prompt_ids]
    assert [request.token_ids for request in good] == 2 * [request.token_ids for request in expected]
    assert [request.steps for request in good] == 2 * [request.steps for request in expected]  # then the proposals
    assert any(step.accepted for request in good for step in request.steps)
    for request in bad:
        assert (request.finished, request.token_ids) == (FinishReason.ERROR, [])
        with pytest.raises(EngineError, match="the target's logits of output token 1 are NaN or infinite"):
            completion(request)


def test_nan_in_the_log_probabilities_of_a_prompt_ends_that_request_only(session: Session) -> None:
    """It is met in the first of three chunks."""
    params = SamplingParams(max_tokens=12, prompt_logprobs=True)
    (expected,) = step_to_the_end(session, [PROMPTS[1]], params)
    bad, good = step_to_the_end(session, [[*range(20, 25), BAD, *range(30, 70)], PROMPTS[1]], params)
    assert (good.token_ids, good.prompt_logprobs) == (expected.token_ids, expected.prompt_logprobs)
    assert (bad.finished, bad.token_ids) == (FinishReason.ERROR, [])
    with pytest.raises(EngineError, match=r"log probabilities of the prompt: .*found NaN"):
        completion(bad)


def test_such_an_answer_has_no_token_where_the_last_row_is_finite(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = session.target.verify

    def with_a_bad_row(*arguments: object, **options: object) -> Verified:
        verified = verify(*arguments, **options)  # type: ignore[arg-type]
        with torch.inference_mode():
            verified.logits[0] = float("nan")
        return verified

    monkeypatch.setattr(session.target, "verify", with_a_bad_row)
    request = session.request(PROMPTS[0], SamplingParams(max_tokens=1, prompt_logprobs=True))
    session.decoder().run([request])
    assert (request.finished, request.token_ids) == (FinishReason.ERROR, [])


@pytest.mark.parametrize(
    ("params", "value"),
    list(zip(PARAMS, (float("nan"), float("inf"), float("-inf")), strict=True)),
    ids=["greedy", "sampled", "penalised"],
)
def test_a_row_behind_an_accepted_token_ends_the_block(
    session: Session, params: SamplingParams, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens before it stand; at the row itself, the first of a later step, the answer ends."""
    whole = run(session.plain_decoder(), [session.request(PROMPTS[0], params)])[0].token_ids
    verify, seen = session.target.verify, 0

    def with_a_bad_row(*arguments: object, **options: object) -> Verified:
        """Logits after the fifth token of the answer are not finite."""
        nonlocal seen
        verified = verify(*arguments, **options)  # type: ignore[arg-type]
        first = max(0, 5 - len(request.token_ids))
        if len(request.token_ids) + len(verified.logits) > 5:
            with torch.inference_mode():
                verified.logits[first] = value
            seen += 1
        return verified

    request = session.request(PROMPTS[0], params)
    monkeypatch.setattr(session.target, "verify", with_a_bad_row)
    session.decoder().run([request])
    assert seen
    assert (request.finished, request.token_ids) == (FinishReason.ERROR, whole[:5])
    assert "logits of output token 6" in str(request.error)


def test_an_answer_is_counted_by_the_reason_that_it_reports() -> None:
    """A stop text in the last, incomplete character ends an answer that has all its tokens."""
    session = open_trained("tiny-qwen3")
    assert session.tokenizer is not None
    byte = session.tokenizer("🙂")["input_ids"][0]
    params = SamplingParams(max_tokens=1, stop="\ufffd", logit_bias={byte: 100})
    request, decoder = session.request(PROMPTS[0], params), session.decoder()
    decoder.run([request])
    assert request.finished is FinishReason.STOP
    assert decoder.metrics().finished == {FinishReason.STOP: 1}


def first_of_the_largest(row: list[float]) -> int:
    """A NaN is larger than all."""
    for place, value in enumerate(row):
        if math.isnan(value):
            return place
    return row.index(max(row))


@given(st.integers(1, 300), st.integers(1, 3), st.integers(0, 2**32), st.sampled_from(["float32", "bfloat16"]))
def test_a_greedy_token_is_the_first_of_the_largest(vocab: int, rows: int, seed: int, dtype: str) -> None:
    """In few values, so that many are equal, with a NaN and infinities here and there."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(-3, 3, (rows, vocab)).astype(np.float32)
    for value in (np.nan, np.inf, -np.inf):
        logits[rng.random(rows) < 0.2] = -np.inf
        logits[rng.integers(rows), rng.integers(vocab)] = value if rng.random() < 0.5 else 3.0
    expected = [first_of_the_largest(row.tolist()) for row in logits]
    tensor = torch.from_numpy(logits).to(getattr(torch, dtype))
    assert argmax(tensor[None])[0].tolist() == expected
    params = SamplingParams(max_tokens=2)
    requests = [Request(prompt_ids=[1], params=params, sampler=params.sampler(), stop_ids=frozenset()) for _ in logits]
    parts = [StepInput(slot, [1], 1, request, NO_PROPOSALS) for slot, request in enumerate(requests)]
    are_finite = [bool(np.isfinite(row[token])) for row, token in zip(logits, expected, strict=True)]
    chosen = [[token] if is_finite else [] for token, is_finite in zip(expected, are_finite, strict=True)]
    assert accept_parts(parts, tensor) == chosen


@dataclass(frozen=True)
class Recorded:
    """Steps of a loop, in the oracles' terms."""

    token_ids: list[int]
    committed: list[int]


def speculate(session: Session, prompt: Sequence[int], tokens: int) -> Recorded:
    request = decode(session, prompt, greedy(tokens))
    return Recorded(token_ids=request.token_ids, committed=[len(step.token_ids) for step in request.steps])


def plain(session: Session, prompt: Sequence[int], tokens: int, stop: Sequence[int] = ()) -> list[int]:
    (answer,) = run(session.plain_decoder(), [session.request(prompt, greedy(tokens, stop))])
    return answer.token_ids


def random_session(path: Path, dialect: Dialect, seed: int) -> tuple[Session, Path, Path]:
    target, draft = write_random_pair(path, dialect=dialect, seed=seed)
    build(draft, path / "engine", target)
    return open_without_tokenizer(path / "engine", target), target, draft


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2))])
@pytest.mark.parametrize("dialect", ["qwen3", "gpt_oss"])
def test_random_pairs_equal_the_oracles(tmp_path: Path, dialect: Dialect, seed: int) -> None:
    """A vocabulary of five: untrained drafters are often right, and every acceptance length occurs."""
    session, target_dir, draft_dir = random_session(tmp_path, dialect, seed)
    target, prompt = load_target(target_dir), [1, 2, 3, 1]
    ours = speculate(session, prompt, 24)
    definition = reference_greedy(target, draft_dir, prompt, 24)
    oracle = dflash_greedy(target, load_assistant(draft_dir), prompt, 24, eos_ids=())
    assert ours.token_ids == plain_greedy(target, prompt, 24, eos_ids=()) == definition.output_ids
    assert ours.committed == definition.committed == oracle.committed


@pytest.mark.parametrize("name", PAIRS)
def test_fixtures_equal_the_oracle(name: str, sessions: dict[str, Session]) -> None:
    """Tokens and tokens by verify step, on a prompt kept out of training."""
    session, draft_dir = sessions[name], FIXTURES / f"{name}-dflash"
    target, assistant = load_target(FIXTURES / name), load_assistant(draft_dir)
    prompt = prompts(session)[0]
    ours = speculate(session, prompt, 48)
    oracle = dflash_greedy(target, assistant, prompt, 48, eos_ids=())
    assert ours.token_ids == oracle.output_ids
    assert ours.committed == oracle.committed


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_fixture_acceptance_is_worth_looking_at(name: str) -> None:
    """tau >= 3.5 over 128 new tokens at the trained block size, mean over all held-out prompts."""
    session = open_trained(name, max_batch_size=16)
    answers = run(session.decoder(), [session.request(prompt, greedy(128)) for prompt in prompts(session)])
    assert sum(answer.tau or 0 for answer in answers) / len(answers) >= 3.5


def test_max_tokens_is_exact(tmp_path: Path) -> None:
    session, target_dir, _ = random_session(tmp_path, "qwen3", seed=1)
    target = load_target(target_dir)
    for tokens in (1, 2, 3, 5, 8, 11):
        expected = plain_greedy(target, [1, 2], tokens, eos_ids=())
        request = decode(session, [1, 2], greedy(tokens))
        assert request.token_ids == expected
        left = tokens - 1
        for step in request.steps:
            assert step.proposed < left, "with the token behind them they would exceed it"
            left -= len(step.token_ids)
        assert plain(session, [1, 2], tokens) == expected


def test_a_stop_token_cuts_inside_an_accepted_block(tmp_path: Path) -> None:
    session, target_dir, _ = random_session(tmp_path, "qwen3", seed=2)
    target = load_target(target_dir)
    cut = 0
    for stop in range(5):
        expected = plain_greedy(target, [3, 2, 3], 24, eos_ids=[stop])
        ours, decoder = session.request([3, 2, 3], greedy(24, [stop])), session.decoder()
        decoder.run([ours])
        counts = decoder.metrics()
        assert (counts.output_tokens, counts.acceptance) == (len(expected), Acceptance.of(ours.steps))
        assert ours.token_ids == expected
        assert sum(len(step.token_ids) for step in ours.steps) == len(expected) - 1
        for step in ours.steps:
            assert step.token_ids[: step.accepted] == step.proposals[: step.accepted]
            cut += step.accepted == len(step.token_ids)
        assert plain(session, [3, 2, 3], 24, [stop]) == expected
    assert cut > 0, "no stop token was an accepted draft"


class Alternating(FixedLength):
    """Drafts at all steps but each fourth, and keeps the records of its steps."""

    def __init__(self) -> None:
        super().__init__(2)
        self.chosen: list[int] = []
        self.records: list[StepRecord] = []

    def choose(self, batch_size: int) -> int:
        self.chosen.append(2 * (len(self.chosen) % 4 != 3))
        return self.chosen[-1]

    def observe(self, step: StepRecord) -> None:
        if step.proposed:
            assert len(self.records) == len(self.chosen) - 1, "each step is observed before the next one begins"
            self.records.append(step)


def test_a_step_record_says_what_the_step_did(sessions: dict[str, Session]) -> None:
    session, policy = sessions["tiny-qwen3"], Alternating()
    request = session.request(prompts(session)[0], greedy(40))
    run(session.decoder(policy), [request])
    steps = request.steps
    assert len(policy.records) == len(steps) > 6
    for record, step, chosen in zip(policy.records, steps, policy.chosen, strict=True):
        assert record.num_prompt_tokens == 0
        assert record.seconds > 0
        assert (record.proposed, record.free) == ([step.proposed], ())
        if step is not steps[-1]:  # the limit cuts the last one
            assert step.proposed == chosen
            assert record.accepted == [step.accepted]


def test_a_step_record_says_that_prompts_were_read() -> None:
    """The second prompt takes several steps, while the first request decodes."""
    session, policy = open_trained("tiny-qwen3", max_batch_size=2), Alternating()
    first, second = (session.request(prompts(session)[i], greedy(30)) for i in range(2))
    decoder = Decoder(ModelRunner(session.target, session.drafter), SlotPool(2, 10**4), policy, prefill_chunk=8)
    decoder.add(first)
    while not first.steps:
        decoder.step()
    decoder.add(second)
    begin = len(policy.records)
    while not second.token_ids:
        decoder.step()
    assert len(policy.records) - begin == -(-len(second.prompt_ids) // 8) > 1
    assert sum(record.num_prompt_tokens for record in policy.records[begin:]) == len(second.prompt_ids)
    assert all(record.num_prompt_tokens and len(record.proposed) == 1 for record in policy.records[begin:])
    decoder.step()
    assert policy.records[-1].num_prompt_tokens == 0
    assert len(policy.records[-1].proposed) == 2


@pytest.fixture
def short_session(tmp_path: Path) -> Session:
    """A draft with positions for 64 tokens, of a target with more; five slots."""
    draft = shutil.copytree(FIXTURES / "tiny-qwen3-dflash", tmp_path / "draft")
    build(edit_config(draft, max_position_embeddings=64), tmp_path / "engine", FIXTURES / "tiny-qwen3")
    return open_trained("tiny-qwen3", tmp_path / "engine", max_batch_size=5)


def test_beyond_the_drafts_positions_decoding_goes_on(short_session: Session, caplog: pytest.LogCaptureFixture) -> None:
    """Without drafts and with the same text, in one batch with a request that has drafts, and on cached prefixes."""
    text = [token for prompt in prompts(short_session) for token in prompt]
    given, params = [text[3:33], *(text[:length] for length in (40, 63, 64, 200))], greedy(40)
    expected = [short_session.generate_plain(each, params).token_ids for each in given]
    decoder = short_session.decoder(prefix_caching=True)
    for _ in range(2):
        requests = [short_session.request(each, params) for each in given]
        assert [answer.token_ids for answer in run(decoder, requests)] == expected
        for request in requests:
            drafted, position = [], len(request.prompt_ids)  # where the last token stands before each step
            for step in request.steps:
                drafted.append((position, len(step.proposals)))
                position += len(step.token_ids)
            assert all((num_drafts > 0) == (position < 64) for position, num_drafts in drafted[:-1])
        assert sum(len(step.token_ids) for step in requests[0].steps) > 1.5 * len(requests[0].steps)
    (said,) = caplog.records
    assert "positions for 64 tokens (max_position_embeddings): longer requests go on without" in said.getMessage()
