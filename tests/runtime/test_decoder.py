# SPDX-License-Identifier: Apache-2.0
"""The decode loop against three independent ones: plain greedy decoding, the definition, transformers.

Acceptance must agree too: most mistakes in a drafter leave the text right and only cost steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.draft_length import FixedLength, StepRecord
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.model_runner import LocalRunner
from dflash_trt.runtime.session import Session, open_session, run
from tests.decoding import decode, greedy, open_without_tokenizer
from tests.engines import build, trained_engine
from tests.fixtures_data import PAIRS, prompts
from tests.oracle.random_pairs import write_random_pair
from tests.oracle.transformers_dflash import dflash_greedy, load_assistant, load_target, plain_greedy
from tests.paths import FIXTURES
from tests.reference.decode_loop import reference_greedy
from tests.reference.synthetic import Dialect


@dataclass(frozen=True)
class Recorded:
    """What a loop did, in the oracles' words."""

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
    ours = speculate(session, prompt, 60)
    definition = reference_greedy(target, draft_dir, prompt, 60)
    oracle = dflash_greedy(target, load_assistant(draft_dir), prompt, 60, eos_ids=())
    assert ours.token_ids == plain_greedy(target, prompt, 60, eos_ids=()) == definition.output_ids
    assert ours.committed == definition.committed == oracle.committed


@pytest.mark.parametrize("name", PAIRS)
def test_fixtures_equal_the_oracle(name: str, sessions: dict[str, Session]) -> None:
    """Tokens and tokens by verify step, on prompts kept out of training."""
    session, draft_dir = sessions[name], FIXTURES / f"{name}-dflash"
    target, assistant = load_target(FIXTURES / name), load_assistant(draft_dir)
    for prompt in prompts(session)[:2]:
        ours = speculate(session, prompt, 96)
        oracle = dflash_greedy(target, assistant, prompt, 96, eos_ids=())
        assert ours.token_ids == oracle.output_ids
        assert ours.committed == oracle.committed


@pytest.mark.parametrize("name", PAIRS)
def test_fixture_acceptance_is_worth_looking_at(name: str) -> None:
    """tau >= 3.5 over 128 new tokens at the trained block size, mean over all held-out prompts."""
    session = open_session(trained_engine(name), str(FIXTURES / name), RuntimeOptions(max_batch_size=16))
    answers = run(session.decoder(), [session.request(prompt, greedy(128)) for prompt in prompts(session)])
    assert sum(answer.tau or 0 for answer in answers) / len(answers) >= 3.5


def test_max_tokens_is_exact(tmp_path: Path) -> None:
    session, target_dir, _ = random_session(tmp_path, "qwen3", seed=1)
    target = load_target(target_dir)
    for tokens in range(1, 12):
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
        expected = plain_greedy(target, [3, 2, 3], 40, eos_ids=[stop])
        ours = decode(session, [3, 2, 3], greedy(40, [stop]))
        assert ours.token_ids == expected
        assert sum(len(step.token_ids) for step in ours.steps) == len(expected) - 1
        for step in ours.steps:
            assert step.token_ids[: step.accepted] == step.proposals[: step.accepted]
            cut += step.accepted == len(step.token_ids)
        assert plain(session, [3, 2, 3], 40, [stop]) == expected
    assert cut > 0, "no stop token was an accepted draft"


def test_rollback_of_a_full_sliding_window(tmp_path: Path) -> None:
    """The gpt-oss target's window is 8: every rejected block is taken out of a full one."""
    session, target_dir, _ = random_session(tmp_path, "gpt_oss", seed=4)
    prompt = [1, 2, 3, 0] * 8
    ours = speculate(session, prompt, 80)
    assert ours.token_ids == plain_greedy(load_target(target_dir), prompt, 80, eos_ids=())
    assert min(ours.committed) == 1, "no block was rejected: the test shows nothing"


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
    """The drafter catches up in the first step of all, on the prompt, and in each behind one without drafts."""
    session, policy = sessions["tiny-qwen3"], Alternating()
    request = session.request(prompts(session)[0], greedy(40))
    run(session.decoder(policy), [request])
    assert len(policy.records) == len(request.steps) > 6
    for number, (record, step, chosen) in enumerate(zip(policy.records, request.steps, policy.chosen, strict=True)):
        assert record.num_caught_up == (number % 4 == 0)
        assert record.num_prompt_tokens == 0
        assert record.proposed == [step.proposed]
        if step is not request.steps[-1]:  # the limit cuts the last one
            assert step.proposed == chosen
            assert record.accepted == [step.accepted]


def test_a_step_record_says_that_prompts_were_read() -> None:
    """The second prompt takes several steps, while the first request decodes."""
    engine, options = trained_engine("tiny-qwen3"), RuntimeOptions(max_batch_size=2)
    session, policy = open_session(engine, str(FIXTURES / "tiny-qwen3"), options), Alternating()
    first, second = (session.request(prompts(session)[i], greedy(30)) for i in range(2))
    decoder = Decoder(LocalRunner(session.target, session.drafter), SlotPool(2, 10**4), policy, prefill_chunk=8)
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
