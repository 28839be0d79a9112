# SPDX-License-Identifier: Apache-2.0
"""Requests that share steps: each gets the same tokens as alone, and none waits longer than necessary."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from dflash_trt.api.acceptance import Step
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for
from dflash_trt.runtime.policy.draft_length import FixedLength
from dflash_trt.runtime.policy.parse_draft_length import parse_draft_length
from dflash_trt.runtime.request import Request
from tests.decoding import greedy
from tests.runtime.batches import Job, WatchedRunner, Workload, drive, fixture_workload, random_workload

WORKLOADS: dict[str, Callable[[Path], Workload]] = {
    "random-qwen3": lambda path: random_workload(path, "qwen3", 8),
    "random-gpt-oss": lambda path: random_workload(path, "gpt_oss", 6),
    "sequential-gpt-oss": lambda path: random_workload(path, "gpt_oss", 6, packed=False),
    "tiny-qwen3": lambda _: fixture_workload("tiny-qwen3"),
    "tiny-gpt-oss": lambda _: fixture_workload("tiny-gpt-oss"),
}
ROOM = 80
"""Tokens in all slots together, beyond those of the longest request: too few for eight requests."""


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Workload]:
    made: dict[str, Workload] = {}

    def workload(name: str) -> Workload:
        if name not in made:
            made[name] = WORKLOADS[name](tmp_path_factory.mktemp(name))
        return made[name]

    return workload


@pytest.fixture
def workload(workloads: Callable[[str], Workload]) -> Workload:
    return workloads("random-qwen3")


QUICK = [("random-qwen3", "auto", 7), ("tiny-qwen3", "7", 1000)]
OTHERS = [
    ("random-qwen3", "1", 1000), ("random-gpt-oss", "1:5,3:2,6:0", 7), ("random-gpt-oss", "4", 1000),
    ("sequential-gpt-oss", "0", 7), ("sequential-gpt-oss", "5", 1000), ("tiny-qwen3", "1:7,3:3,6:0", 7),
    ("tiny-gpt-oss", "auto", 1000), ("tiny-gpt-oss", "3", 7),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "length", "prefill_chunk"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS)]
)
def test_greedy_output_is_that_of_plain_decoding_alone(
    workloads: Callable[[str], Workload], name: str, length: str, prefill_chunk: int
) -> None:
    workload = workloads(name)
    policy = parse_draft_length(length, workload.num_draft_tokens)
    requests = [workload.request(job) for job in workload.jobs]
    budget = max(request.max_length for request in requests) + ROOM
    decoder = workload.decoder(policy, num_tokens=budget, prefill_chunk=prefill_chunk)
    most_running = most_waiting = 0

    def look() -> None:
        nonlocal most_running, most_waiting
        most_running = max(most_running, len(decoder.running))
        if decoder.slots.free_slots:
            most_waiting = max(most_waiting, len(decoder.waiting))

    drive(decoder, requests, random.Random(length), look)
    assert [request.token_ids for request in requests] == [job.expected for job in workload.jobs]
    assert {request.finished for request in requests} == {FinishReason.LENGTH}
    assert most_running >= 4
    assert most_waiting >= 1, "the budget kept nobody waiting"


@pytest.mark.parametrize(("name", "length"), [("random-qwen3", 0), ("tiny-qwen3", 7)])
def test_steps_are_those_of_decoding_alone(workloads: Callable[[str], Workload], name: str, length: int) -> None:
    """Proposals for one request do not depend on the others; those of a trained drafter depend on its own context."""
    workload = workloads(name)
    jobs = workload.jobs[:10]
    requests = [workload.request(job) for job in jobs]
    drive(workload.decoder(length, prefill_chunk=7), requests, random.Random(1))
    for job, request in zip(jobs, requests, strict=True):
        assert request.steps == workload.alone(job, length).steps


class LateDrafts(FixedLength):
    """None for the first twelve steps."""

    num_steps = 0

    def choose(self, batch_size: int) -> int:
        self.num_steps += 1
        return self.length if self.num_steps > 12 else 0


def test_drafts_after_a_pause_are_those_of_a_context_that_kept_up(
    workloads: Callable[[str], Workload], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests come and go while none drafts, and their context grows in passes of any number of rows."""
    workload = workloads("tiny-qwen3")

    def steps(num_rows: int) -> list[list[Step]]:
        monkeypatch.setattr("dflash_trt.runtime.model_runner.MAX_ROWS", num_rows)
        requests = [workload.request(job) for job in workload.jobs[:12]]
        drive(workload.decoder(LateDrafts(7)), requests, random.Random(2))
        return [request.steps for request in requests]

    late = steps(5)
    assert late == steps(10**6)
    assert max(step.accepted for request in late for step in request) >= 5


def test_no_token_is_computed_twice(workload: Workload) -> None:
    pair = WatchedRunner(workload.session)
    decoder = workload.decoder(3, num_tokens=200, prefill_chunk=7, runner=pair)
    requests = [workload.request(job) for job in workload.jobs[:24]]
    drive(decoder, requests, random.Random(2))
    prompts = sum(len(request.prompt_ids) for request in requests)
    steps = [step for request in requests for step in request.steps]
    assert pair.num_computed == prompts + len(steps) + sum(step.proposed for step in steps)
    # Logits are computed for verified rows and after each prompt; the drafter proposes at most 3 tokens.
    logits = sum(segment.num_logits for segments in pair.passes for segment in segments)
    assert logits == len(requests) + len(steps) + sum(step.proposed for step in steps)
    assert max(step.proposed for step in steps) == 3
    counts = decoder.metrics()
    assert counts.passes == len(pair.passes)
    assert counts.acceptance.passes == len(steps)
    assert counts.acceptance.proposed == sum(step.proposed for step in steps)
    assert counts.acceptance.accepted == sum(step.accepted for step in steps)
    assert counts.output_tokens == sum(len(request.token_ids) for request in requests)
    assert counts.tau == pytest.approx((counts.output_tokens - len(requests)) / len(steps))
    assert counts.finished == {FinishReason.LENGTH: len(requests)}
    accepted = tuple(sum(step.accepted >= position for step in steps) for position in range(1, 4))
    assert counts.acceptance.accepted_by_position == accepted
    assert (counts.running, counts.waiting) == (0, 0)


def test_a_long_prompt_does_not_stall_the_others(workload: Workload) -> None:
    """It comes in chunks, and in every step meanwhile each of the others gets at least one token."""
    pair = WatchedRunner(workload.session)
    decoder = workload.decoder(0, prefill_chunk=4, runner=pair)
    others = [workload.request(job, greedy(60)) for job in workload.jobs[:3]]
    for other in others:
        decoder.add(other)
    while not all(other.token_ids for other in others):
        decoder.step()
    long = workload.request(Job(prompt_ids=[1] * 39, max_tokens=2, expected=[]))
    decoder.add(long)
    begin = len(pair.passes)
    for step in range(1, 11):
        before = [len(other.token_ids) for other in others]
        decoder.step()
        assert [len(other.token_ids) for other in others] == [count + 1 for count in before]
        assert long.num_prefilled == min(4 * step, 39)
    chunks = [[len(segment.token_ids) for segment in segments if segment.slot == 3] for segments in pair.passes[begin:]]
    assert chunks == [[4]] * 9 + [[3]]
    assert len(long.token_ids) == 1
    drive(decoder, [])


def test_prompts_share_a_steps_chunk_oldest_first(workload: Workload) -> None:
    pair = WatchedRunner(workload.session)
    decoder = workload.decoder(5, prefill_chunk=10, runner=pair)
    lengths = [7, 5, 21, 2]
    requests = [workload.request(Job(prompt_ids=[1] * n, max_tokens=1, expected=[])) for n in lengths]
    drive(decoder, requests)
    taken = [[(segment.slot, len(segment.token_ids)) for segment in segments] for segments in pair.passes]
    assert taken == [[(0, 7), (1, 3)], [(1, 2), (2, 8)], [(2, 10)], [(2, 3), (3, 2)]]


def test_first_come_first_served(workload: Workload) -> None:
    """First come, first served: a small request waits for an earlier large one that does not fit yet."""
    num_tokens = 64
    decoder = workload.decoder(2, num_tokens=num_tokens, prefill_chunk=9)
    sizes = [(20, 20), (1, 2), (39, 20), (1, 1), (1, 1), (20, 5), (10, 40), (1, 1), (1, 3)]
    requests = [workload.request(Job(prompt_ids=[1] * n, max_tokens=m, expected=[])) for n, m in sizes]
    for request in requests:
        decoder.add(request)
    admitted: list[Request] = []
    while not decoder.is_idle:
        decoder.step()
        admitted += [r for r in requests if r.admitted is not None and r not in admitted]
        assert admitted == requests[: len(admitted)]
        assert sum(num_pages_for(r.max_length) for r in decoder.running.values()) <= num_tokens // TOKENS_PER_PAGE
    times = [request.admitted or 0 for request in requests]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("when", "num_others", "prefill_chunk"),
    [("waiting", 8, 7), ("prefilling", 8, 7), ("decoding", 8, 7), ("decoding", 2, 1000)],
)
def test_a_cancelled_request_leaves_the_others_as_they_are(
    workload: Workload, when: str, num_others: int, prefill_chunk: int
) -> None:
    """In the last case nothing else changes the batch: no request waits, and all prompts have been read."""
    decoder = workload.decoder(5, num_slots=4, prefill_chunk=prefill_chunk)
    told: list[Request] = []
    victim = workload.session.request([1] * 20, greedy(30), told.append)
    jobs = workload.jobs[12 : 12 + num_others]
    others = [workload.request(job) for job in jobs]
    order = [*others, victim] if when == "waiting" else [victim, *others]
    for request in order:
        decoder.add(request)
    is_there: dict[str, Callable[[], bool]] = {
        "waiting": lambda: victim in decoder.waiting,
        "prefilling": lambda: 0 < victim.num_prefilled < 20,
        "decoding": lambda: len(victim.token_ids) >= 3,
    }
    decoder.step()
    while not is_there[when]():
        decoder.step()
    token_ids = list(victim.token_ids)
    had_slot = victim in decoder.running.values()
    free_slots = decoder.slots.free_slots
    reports = len(told)

    decoder.cancel(victim)
    assert decoder.slots.free_slots == free_slots + had_slot
    assert (victim.finished, victim.token_ids) == (FinishReason.CANCELLED, token_ids)
    assert victim.ended is not None
    assert len(told) == reports + 1, "its end is told, once"
    decoder.cancel(victim)
    assert len(told) == reports + 1
    drive(decoder, [])
    assert victim.token_ids == token_ids
    assert [other.token_ids for other in others] == [job.expected for job in jobs]
    assert decoder.metrics().finished == {FinishReason.CANCELLED: 1, FinishReason.LENGTH: len(others)}


def test_cancelling_what_has_ended_or_never_came_changes_nothing(workload: Workload) -> None:
    decoder = workload.decoder(5)
    request, stranger = workload.request(workload.jobs[0]), workload.request(workload.jobs[1])
    drive(decoder, [request])
    decoder.cancel(request)
    assert request.finished is FinishReason.LENGTH
    decoder.cancel(stranger)
    assert stranger.finished is FinishReason.CANCELLED
    drive(decoder, [again := workload.request(workload.jobs[2])])
    assert again.token_ids == workload.jobs[2].expected


def test_random_cancels_leave_the_others_as_they_are(workload: Workload) -> None:
    rng = random.Random(4)
    decoder = workload.decoder(3, num_tokens=200, prefill_chunk=7)
    requests = [workload.request(job) for job in workload.jobs]

    def cancel_one() -> None:
        if rng.random() < 0.2 and not decoder.is_idle:
            decoder.cancel(rng.choice([*decoder.waiting, *decoder.running.values()]))

    drive(decoder, requests, rng, cancel_one)
    cancelled = [request for request in requests if request.finished is FinishReason.CANCELLED]
    assert 3 < len(cancelled) < 28
    for request, job in zip(requests, workload.jobs, strict=True):
        full = job.expected
        assert request.token_ids == (full[: len(request.token_ids)] if request in cancelled else full)


@pytest.mark.parametrize("name", ["random-qwen3", pytest.param("tiny-gpt-oss", marks=pytest.mark.full)])
def test_requests_that_leave_for_other_clients_emit_what_they_would_have(
    workloads: Callable[[str], Workload], name: str
) -> None:
    """One client takes all slots before others come, whose requests then displace some of its own."""
    workload = workloads(name)
    decoder = workload.decoder(3, num_slots=4, prefill_chunk=7)
    sampled = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.2)
    params = [
        msgspec.structs.replace(each, max_tokens=job.max_tokens, logprobs=True, top_logprobs=2, prompt_logprobs=True)
        for job, each in zip(workload.jobs, itertools.cycle([greedy(1), sampled]), strict=False)
    ]
    requests = [workload.request(*each) for each in zip(workload.jobs, params, strict=True)]
    alone = [workload.alone(job, 3, each) for job, each in zip(workload.jobs, params, strict=True)]
    for number, request in enumerate(requests):
        request.client = "many" if number % 8 < 6 else f"few {number % 2}"
    displaced = list[bool]()
    for request in [r for r in requests if r.client == "many"]:
        decoder.add(request)
    decoder.step()
    waiting = [r for r in requests if r.client != "many"]

    def look() -> None:
        displaced.extend(bool(r.token_ids) for r in decoder.waiting if r.admitted is not None)

    drive(decoder, waiting, random.Random(1), look)
    assert {*displaced} == {False, True}, "before and after their first token"
    for request, expected in zip(requests, alone, strict=True):
        assert request.token_ids == expected.token_ids
        assert request.finished == expected.finished
        assert request.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert request.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-4)
        assert [[*tops] for tops in request.prompt_top_logprobs] == [[*tops] for tops in expected.prompt_top_logprobs]


def test_a_client_waits_for_no_others_queue(workload: Workload) -> None:
    """A new client's request is admitted before the next step, which others' prompts do not fill."""
    decoder = workload.decoder(3, num_slots=4, prefill_chunk=8)
    many = [workload.request(Job(prompt_ids=[1] * 40, max_tokens=8, expected=[])) for _ in range(12)]
    for request in many:
        request.client = "many"
        decoder.add(request)
    decoder.step()
    few = workload.request(Job(prompt_ids=[2] * 9, max_tokens=2, expected=[]))
    few.client = "few"
    decoder.add(few)
    decoder.step()
    assert few in decoder.running.values()
    for _ in range(3):
        decoder.step()
    assert few.finished is FinishReason.LENGTH
    drive(decoder, [])
    assert {request.finished for request in many} == {FinishReason.LENGTH}
