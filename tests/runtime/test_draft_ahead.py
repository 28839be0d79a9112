# SPDX-License-Identifier: Apache-2.0
"""The next step's drafts are made while the host reports: the order of calls, and requests that end meanwhile."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.api.acceptance import AcceptanceCounter
from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.proposals import Proposals
from dflash_trt.runtime import decoder as decoder_module
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.policy.draft_length import FixedLength
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.text import TextStream
from tests.contract.cuda_graphs import pretended_gpu
from tests.decoding import greedy, open_trained
from tests.fixtures_data import prompts
from tests.runtime.batches import PartlyRight, drive, random_workload

REPORTING = {"text", "callback", "metrics", "publishing", "release"}


class Ahead(ModelRunner):
    """Makes its drafts ahead on any device, as it does on a GPU."""

    drafts_ahead = True


class PartlyRightAhead(Ahead, PartlyRight):
    """Proposals that are right in part, ahead."""


def test_between_verify_and_the_next_drafts_the_host_only_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, callbacks, metrics, shared pages and freed slots come while the GPU drafts."""
    events = list[str]()

    def note(owner: Any, method: str, name: str) -> None:
        call = getattr(owner, method)

        def noted(*args: Any, **keywords: Any) -> Any:
            events.append(name)
            return call(*args, **keywords)

        monkeypatch.setattr(owner, method, noted)

    note(decoder_module, "accept_parts", "accept")
    for owner, method, name in (
        (ModelRunner, "verify", "verify"), (ModelRunner, "commit", "commit"), (ModelRunner, "draft", "draft"),
        (ModelRunner, "release", "release"), (TextStream, "_decode", "text"), (AcceptanceCounter, "add", "metrics"),
        (SlotPool, "append", "publishing"),
    ):  # fmt: skip
        note(owner, method, name)
    with pretended_gpu() as (gpu, _):
        session = open_trained("tiny-qwen3", device="cuda", executor="torch", max_batch_size=2)
        note(gpu, "wait", "wait")

        def report(request: Request) -> None:
            events.append("callback")
            assert request.text is not None
            request.text.next_text()

        decoder = session.decoder(prefix_caching=True)
        for prompt, length in zip(prompts(session), (40, 24), strict=False):
            decoder.add(session.request(prompt, greedy(length), report))
        steps = list[list[str]]()
        events.clear()
        while not decoder.is_idle:
            decoder.step()
            steps.append([*events])
            events.clear()
    counts = Counter(event for step in steps for event in step)
    assert all(counts[name] > 2 for name in REPORTING - {"release"}), counts
    assert counts["draft"] > 5
    for step in steps[1:-1]:
        begin = step.index("verify") + 1
        assert [event for event in step[:begin] if event != "wait"] == ["verify"], "nothing before the pass"
        assert step[begin : step.index("draft")] == ["accept", "wait", "commit"]
        assert set(step[step.index("draft") + 1 :]) <= REPORTING
        assert "callback" in step


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (0, 2))])
def test_requests_come_and_go_while_drafts_are_made(tmp_path: Path, seed: int) -> None:
    """Answers are those of plain decoding, in few slots and at random times."""
    workload = random_workload(tmp_path, "qwen3", seed)
    rng = random.Random(seed)
    pair = PartlyRightAhead(workload, rng, num_slots=3, prefix_caching=True)
    for number, request in enumerate(pair.requests):
        request.client = "abc"[number % 3 * (seed > 0)]
    drive(pair.decoder, pair.requests, rng)
    assert [request.token_ids for request in pair.requests] == [job.expected for job in workload.jobs]


def ahead(session: Session, draft: Callable[[ModelRunner], None] = lambda _: None) -> Decoder:
    runner = Ahead(session.target, session.drafter)
    draft(runner)
    return Decoder(runner, SlotPool(2, 10**4), FixedLength(session.manifest.draft.num_draft_tokens))


def test_a_stop_text_ends_an_answer_where_it_does_without(sessions: dict[str, Session]) -> None:
    session = sessions["tiny-qwen3"]
    prompt = prompts(session)[0]
    whole = session.generate(prompt, greedy(40))
    stop = whole.text[20:24]
    params = SamplingParams(max_tokens=40, stop=stop, ignore_eos=True)
    expected = session.generate(prompt, params)
    request = session.request(prompt, params)
    ahead(session).run([request])
    assert request.text is not None
    assert (request.token_ids, request.text.text) == (expected.token_ids, expected.text)
    assert request.text.stopped_by == stop
    assert len(expected.token_ids) < len(whole.token_ids)


def test_drafts_of_a_cancelled_request_are_dropped() -> None:
    """Another request takes the slot in the same step."""
    session = open_trained("tiny-qwen3", max_batch_size=2)
    texts = prompts(session)
    first, second, third = (session.request(text, greedy(30)) for text in texts[:3])
    asked = list[list[int]]()

    def noting(runner: ModelRunner) -> None:
        draft = runner.draft

        def noted(slots: Any, *args: Any) -> Callable[[], list[Proposals]]:
            asked.append([*slots])
            return draft(slots, *args)

        runner.draft = noted  # type: ignore[method-assign]

    decoder = ahead(session, noting)
    decoder.add(first)
    decoder.add(second)
    while len(first.steps) < 2 or len(second.steps) < 2:
        decoder.step()
    assert asked[-1] == [0, 1], "drafts for both are under way"
    num_tokens = len(first.token_ids)
    decoder.cancel(first)
    decoder.add(third)
    decoder.step()
    assert decoder.running[0] is third
    while not decoder.is_idle:
        decoder.step()
    assert (first.finished, len(first.token_ids)) == (FinishReason.CANCELLED, num_tokens)
    for request, text in ((second, texts[1]), (third, texts[2])):
        alone = session.request(text, greedy(30))
        session.decoder().run([alone])
        assert (request.token_ids, request.steps) == (alone.token_ids, alone.steps)
