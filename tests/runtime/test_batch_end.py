# SPDX-License-Identifier: Apache-2.0
"""Requests that are awaited together: what the decoder tells of them, and what auto makes of it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from dflash_trt.llm import LLM
from dflash_trt.runtime.auto_length import AutoLength, Remaining
from dflash_trt.runtime.draft_length import FixedLength
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.session import Session, run
from tests.decoding import greedy
from tests.engines import build
from tests.fixtures_data import prompts
from tests.paths import FIXTURES

K = 7


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("batch-end") / "engine"
    build(FIXTURES / "tiny-qwen3-dflash", path, FIXTURES / "tiny-qwen3")
    return path


@pytest.fixture(scope="module")
def session(engine: Path) -> Session:
    return Session.open(engine, str(FIXTURES / "tiny-qwen3"), num_slots=2)


class Listener(FixedLength):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(2)
        self.told: list[Remaining | None] = []

    def choose(self, slots: Sequence[int], remaining: Remaining | None = None) -> list[int]:
        self.told.append(remaining)
        return super().choose(slots, remaining)


@pytest.fixture
def listener() -> Listener:
    return Listener()


def test_it_is_told_what_is_left(session: Session, listener: Listener) -> None:
    """Two run at once; as long as more than four wait, the end is far away."""
    limits = (6, 20, 9, 5, 11, 3, 8, 7)
    asked = [session.request(prompt, greedy(n)) for prompt, n in zip(prompts(session), limits, strict=False)]
    answers = run(session.decoder(listener), asked)
    assert [len(answer.token_ids) for answer in answers] == list(limits)
    first = next(i for i, told in enumerate(listener.told) if told is not None)
    assert first > 0, "six wait"
    known = [told for told in listener.told[first:] if told is not None]
    assert len(known) == len(listener.told) - first
    assert known[0].waiting == list(limits[4:])
    assert max(known[0].running.values()) >= 5, "it still reads its prompt"
    assert known[-1].waiting == []
    assert len(known[-1].running) == 1
    totals = [sum(told.running.values()) + sum(told.waiting) for told in known]
    assert totals == sorted(totals, reverse=True)


def test_one_that_is_awaited_alone_makes_it_nobodys_end(session: Session, listener: Listener) -> None:
    decoder = session.decoder(listener)
    alone = session.request(prompts(session)[3], greedy(3))
    decoder.add(alone)
    run(decoder, [session.request(prompt, greedy(12)) for prompt in prompts(session)[:3]])
    number = next(i for i, told in enumerate(listener.told) if told is not None)
    assert number >= len(alone.steps)
    assert None not in listener.told[number:]


@pytest.mark.parametrize("number", [1, 2])
def test_who_is_awaited_alone_is_not_told_of(session: Session, listener: Listener, number: int) -> None:
    decoder = session.decoder(listener)
    if number == 1:
        run(decoder, [session.request(prompts(session)[0], greedy(8))])
    for _ in range(number):
        decoder.add(session.request(prompts(session)[0], greedy(8)))
    while not decoder.is_idle:
        decoder.step()
    assert set(listener.told) == {None}


def test_limits_say_nothing_where_answers_end_before_them(session: Session, listener: Listener) -> None:
    prompt = prompts(session)[0]
    (answer,) = run(session.plain_decoder(), [session.request(prompt, greedy(6))])
    stopped = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(answer.token_ids[-1],))
    decoder = session.decoder(listener)
    run(decoder, [session.request(prompt, stopped) for _ in range(2)])
    assert None not in listener.told, "nothing has ended yet"
    listener.told.clear()
    run(decoder, [session.request(prompt, greedy(8)) for _ in range(2)])
    assert set(listener.told) == {None}


@pytest.fixture
def llm(engine: Path) -> Iterator[LLM]:
    with closing(LLM(engine, str(FIXTURES / "tiny-qwen3"), max_batch_size=4)) as llm:
        yield llm


def test_prompts_of_one_call_are_awaited_together(
    llm: LLM, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoLength, "choose", lambda auto, *given: listener.choose(*given))
    params = greedy(12)
    llm.generate(["import os", "class A:"], params)
    assert None not in listener.told
    listener.told.clear()
    llm.generate("import os", params)
    list(llm.stream("import os", params))
    assert set(listener.told) == {None}


def test_nothing_new_is_tried_for_the_last_few_tokens() -> None:
    """A batch size of which nothing is known begins with whole blocks, which a few tokens never pay for."""

    def settled() -> AutoLength:
        policy, slots = AutoLength(K), range(16)
        for _ in range(200):
            chosen = policy.choose(slots)
            policy.observe(slots, chosen, [0] * 16)
            policy.measure(16, chosen[0], 1e-3 * (1 + chosen[0]), 1e-4)
        assert policy.choose(slots) == [0] * 16
        return policy

    assert settled().choose([0], Remaining(running={0: 100}, waiting=[])) == [K]
    assert settled().choose([0], Remaining(running={0: 3}, waiting=[])) == [0]
    assert settled().choose([0], Remaining(running={0: 3}, waiting=[100])) == [K]


def seconds(batch: int, length: int) -> float:
    """Of a step. Drafting costs as much for one request as for many: who is left behind takes long."""
    return 1e-3 * (1 + 0.01 * batch * (1 + length) + 2 * (length > 0))


def drained(policy: AutoLength, rng: random.Random, *, knows: bool) -> float:
    """Seconds of 12 requests of 96 tokens, some of which draft well and some badly."""
    left, total = dict.fromkeys(range(12), 96), 0.0
    while left:
        slots = list(left)
        chosen = policy.choose(slots, Remaining(running=left, waiting=[]) if knows else None)
        lengths = [min(length, left[slot] - 1) for slot, length in zip(slots, chosen, strict=True)]
        held = [
            next((i for i in range(length) if rng.random() >= 0.6 + 0.03 * slot), length)
            for slot, length in zip(slots, lengths, strict=True)
        ]
        policy.observe(slots, lengths, held)
        mean = round(sum(lengths) / len(slots))
        took = seconds(len(slots), mean)
        policy.measure(len(slots), mean, rng.uniform(0.95, 1.05) * took, 1e-3)
        total += took
        for slot, accepted in zip(slots, held, strict=True):
            left[slot] -= accepted + 1
            if left[slot] <= 0:
                del left[slot]
                policy.release(slot)
    return total


def test_auto_ends_a_batch_sooner_when_it_knows_that_it_is_one() -> None:
    """By tokens a second drafts win as long as all run; but then the slowest run on, a few at a time."""
    plain = 96 * seconds(12, 0)
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for knows, found in ratios.items():
        for seed in range(3):
            policy, rng = AutoLength(K), random.Random(seed)
            for _ in range(4):
                drained(policy, rng, knows=knows)
            found += [drained(policy, rng, knows=knows) / plain for _ in range(6)]
    assert max(ratios[True]) < 1.03
    assert sum(ratios[False]) / 18 > 1.1
