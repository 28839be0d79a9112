# SPDX-License-Identifier: Apache-2.0
"""Requests that are awaited together: what the decoder tells of them, and what auto makes of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import NoneType

import pytest

from dflash_trt.runtime.auto_length import NOTICE_STEPS, AutoLength, Remaining, unknown
from dflash_trt.runtime.draft_length import FixedLength
from dflash_trt.runtime.sampling import SamplingParams
from dflash_trt.runtime.session import Session, run
from tests.decoding import greedy
from tests.engines import build
from tests.fixtures_data import prompts
from tests.paths import FIXTURES

K = 7


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    engine = tmp_path_factory.mktemp("batch-end") / "engine"
    build(FIXTURES / "tiny-qwen3-dflash", engine, FIXTURES / "tiny-qwen3")
    return Session.open(engine, str(FIXTURES / "tiny-qwen3"), num_slots=2)


class Listener(FixedLength):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__(2)
        self.told: list[Remaining | None] = []

    def choose(self, slots: Sequence[int], remaining: Callable[[], Remaining | None] = unknown) -> list[int]:
        self.told.append(remaining())
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
    assert {type(told) for told in listener.told} == {NoneType}


def test_limits_say_nothing_where_answers_end_before_them(session: Session, listener: Listener) -> None:
    prompt = prompts(session)[0]
    (answer,) = run(session.plain_decoder(), [session.request(prompt, greedy(6))])
    stopped = SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(answer.token_ids[-1],))
    decoder = session.decoder(listener)
    run(decoder, [session.request(prompt, params) for params in (stopped, greedy(4))])
    assert None not in listener.told, "nothing has ended yet"
    listener.told.clear()
    run(decoder, [session.request(prompt, greedy(8)) for _ in range(2)])
    assert {type(told) for told in listener.told} == {NoneType}


def settled(steps: int, held: Sequence[int], *, draft: float, token: float = 0.0) -> AutoLength:
    """Has seen so many steps of requests of which so many drafts hold, which have all ended by now.

    A step takes 1 ms without drafts, and with them `draft` ms more and `token` ms for each.
    """
    policy, rng = AutoLength(K), random.Random(0)
    slots = range(len(held))
    for _ in range(steps):
        length = policy.choose(slots, lambda: Remaining(running=dict.fromkeys(slots, 10_000), waiting=[]))[0]
        policy.observe(slots, [length] * len(held), [min(length, n) for n in held])
        took = 1e-3 * (1 + (length > 0) * draft + token * length)
        policy.measure(len(held), length, rng.uniform(0.98, 1.02) * took, 1e-3 * draft)
    for slot in slots:
        policy.release(slot)
    policy._since_review = 0  # what is looked at next has its own reasons
    ask(policy, slots, None)  # nobody's end, so that the next ones get a thought of their own
    return policy


def ask(policy: AutoLength, slots: Sequence[int], remaining: Remaining | None) -> list[int]:
    """What it chooses when it has heard that."""
    told: list[Remaining | None] = []

    def tell() -> Remaining | None:
        told.append(remaining)
        return remaining

    for _ in range(NOTICE_STEPS):
        chosen = policy.choose(slots, tell)
        if told:
            return chosen
    raise AssertionError("it has not asked")


def drafts_held(policy: AutoLength, held: Sequence[int]) -> None:
    """Requests have ended of which so many of K drafts held at each step."""
    slots = range(len(held))
    for _ in range(50):
        policy.observe(slots, [K] * len(held), held)
    for slot in slots:
        policy.release(slot)


def begins_with(policy: AutoLength, tokens: Sequence[int], waiting: Sequence[int] = ()) -> int:
    """The length for new requests that want so many tokens."""
    remaining = Remaining(running=dict(enumerate(tokens)), waiting=list(waiting))
    lengths = ask(policy, range(len(tokens)), remaining)
    assert len(set(lengths)) == 1
    return lengths[0]


def test_nothing_new_is_tried_for_the_last_few_tokens() -> None:
    """A batch size of which nothing is known begins with whole blocks, which a few tokens never pay for."""
    assert begins_with(settled(200, [0] * 16, draft=1, token=1), [100]) == K
    assert begins_with(settled(200, [0] * 16, draft=1, token=1), [3]) == 0
    assert begins_with(settled(200, [0] * 16, draft=1, token=1), [3], waiting=[100]) == K


def test_a_look_ends_where_only_few_tokens_are_left() -> None:
    """It began while many were, and they ended all at once."""
    policy = settled(200, [0], draft=2.8)
    drafts_held(policy, [3])
    assert begins_with(policy, [200]) in range(1, K), "a look"
    assert policy.choose([0, 1], lambda: Remaining(running={0: 3, 1: 3}, waiting=[])) == [0, 0]


@pytest.mark.parametrize(
    ("steps", "tokens", "waiting", "length"),
    [(250, [40], [], K), (3000, [40], [], 0), (3000, [400], [], K), (3000, [40], [400], K)],
    ids=["little", "much", "much for many tokens", "and for those that wait"],
)
def test_drafts_wait_for_what_they_must_catch_up_with(
    steps: int, tokens: Sequence[int], waiting: Sequence[int], length: int
) -> None:
    """As soon as they hold they are worth it, but for steps without them that the drafter must first read."""
    policy = settled(steps, [0], draft=2)
    drafts_held(policy, [K])
    assert begins_with(policy, tokens, waiting) == length


@pytest.mark.parametrize(("tokens", "looks"), [(50, False), (200, True)])
def test_a_look_is_paid_before_the_end(tokens: int, looks: bool) -> None:
    """Four tokens for 3.8 times the time; as little as is known, a length between may be better, if it has the time."""
    policy = settled(200, [0], draft=2.8)
    drafts_held(policy, [3])
    assert (begins_with(policy, [tokens]) in range(1, K)) == looks


def test_new_requests_are_like_earlier_ones() -> None:
    """On average as many drafts held; but a batch waits for the one of which none did."""
    policy = settled(100, [0] * 4, draft=2.5)
    drafts_held(policy, [K, K, K, 0])
    assert begins_with(policy, [96] * 4) == 0
    policy = settled(100, [0] * 4, draft=2.5)
    drafts_held(policy, [5] * 4)
    assert begins_with(policy, [96] * 4) >= 5


def seconds(batch: int, length: int) -> float:
    """Of a step. Drafting costs as much for one request as for many: who is left behind takes long."""
    return 1e-3 * (1 + 0.01 * batch * (1 + length) + 2 * (length > 0))


def drained(policy: AutoLength, rng: random.Random, *, knows: bool) -> float:
    """Seconds of 12 requests of 96 tokens, some of which draft well and some badly."""
    left, total = dict.fromkeys(range(12), 96), 0.0
    while left:
        slots = list(left)
        chosen = policy.choose(slots, (lambda: Remaining(running=left, waiting=[])) if knows else unknown)
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
