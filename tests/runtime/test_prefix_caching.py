# SPDX-License-Identifier: Apache-2.0
"""Requests that begin with what others left in the caches: the tokens and the steps of decoding alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import chain

import pytest
import torch

from dflash_trt.api.completion import FinishReason
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.policy.draft_length import FixedLength
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.huggingface import make_target
from dflash_trt.runtime.targets.target import Segment
from tests.decoding import greedy, open_trained
from tests.fixtures_data import prompts
from tests.runtime.batches import drive
from tests.runtime.targets.families import LINEAR, random_model

NUM_SLOTS = 4
DRAFTS = 7
P = TOKENS_PER_PAGE


NEEDS_BF16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU for which oneDNN has BF16 products"
)
IN_BF16 = pytest.param(("tiny-qwen3", "bfloat16"), id="bfloat16", marks=NEEDS_BF16)
"""A hit's rows are those of a cold run to the bit."""


@pytest.fixture(
    scope="module",
    params=[
        ("tiny-gpt-oss", "float32"),
        pytest.param(("tiny-qwen3", "float32"), marks=pytest.mark.full),
        pytest.param(("tiny-gpt-oss", "bfloat16"), marks=(pytest.mark.full, NEEDS_BF16)),
    ],
    ids="-".join,
)
def session(request: pytest.FixtureRequest) -> Session:
    name, dtype = request.param
    return open_trained(name, max_batch_size=NUM_SLOTS, dtype=dtype)


class WatchedRunner(ModelRunner):
    """Remembers how many tokens each pass computed."""

    computed = 0

    def verify(self, segments: Sequence[Segment]) -> torch.Tensor:
        self.computed += sum(len(segment.token_ids) for segment in segments)
        return super().verify(segments)


def caching(
    session: Session, *, num_pages: int = 1000, length: int = DRAFTS, chunk: int = 48, runner: ModelRunner | None = None
) -> Decoder:
    """A decoder that caches prefixes."""
    runner = runner or ModelRunner(session.target, session.drafter)
    slots = SlotPool(NUM_SLOTS, num_pages * P, prefix_caching=True)
    return Decoder(runner, slots, FixedLength(length), prefill_chunk=chunk)


def alone(session: Session, prompt: Sequence[int], max_tokens: int, length: int = DRAFTS) -> Request:
    """Decoded with nothing beside it and nothing before."""
    request = session.request(prompt, greedy(max_tokens))
    drive(session.decoder(FixedLength(length), prefill_chunk=10**6), [request])
    return request


def same(found: Request, expected: Request) -> bool:
    return found.token_ids == expected.token_ids and found.steps == expected.steps


def texts(session: Session) -> list[list[int]]:
    """Concatenated held-out prompts, each longer than the target's window."""
    known = prompts(session)
    return [list(chain(*known[begin : begin + 8]))[: 6 * P - 3] for begin in (0, 3, 8)]


def chats(session: Session, rng: random.Random, count: int) -> Iterator[tuple[list[int], int]]:
    """Prompts with common beginnings of any length, and answers of any length."""
    begins = texts(session)
    for _ in range(count):
        begin = rng.choice(begins)
        begin = begin[: rng.choice((P - 1, P, P + 1, 2 * P, len(begin), rng.randint(1, len(begin))))]
        yield begin + [rng.randrange(5, 200) for _ in range(rng.choice((0, 1, 5, P)))], rng.choice((1, 2, 9, 40))


class CountingRunner(ModelRunner):
    """Fails when slots are given out without end."""

    num_reserved = 0

    def reserve(self, slot: int, pages: Sequence[int], num_tokens: int) -> None:
        self.num_reserved += 1
        assert self.num_reserved < 20, "requests displace each other in turn"
        super().reserve(slot, pages, num_tokens)


def test_a_request_that_waits_for_its_prefix_displaces_nobody(session: Session) -> None:
    """A request that left a slot for it would take the slot again, without end within one step."""
    long, runner = texts(session)[0], CountingRunner(session.target, session.drafter)
    decoder = caching(session, num_pages=12, chunk=8, runner=runner)
    asked = [(long, 3), ([*range(5, 15)], 20), (long, 3)]
    requests = [session.request(prompt, greedy(length)) for prompt, length in asked]
    for request, client in zip(requests, ("many", "many", "few"), strict=True):
        request.client = client
    for request in requests:
        decoder.add(request)
        decoder.step()
    assert [*decoder.running.values()] == requests[:2]
    drive(decoder, [])
    assert requests[2].num_cached_tokens == 5 * P
    for request, (prompt, length) in zip(requests, asked, strict=True):
        assert request.token_ids == alone(session, prompt, length).token_ids


@pytest.mark.parametrize("session", [("tiny-gpt-oss", "float32"), IN_BF16], indirect=True)
def test_the_next_turn_computes_what_is_new(session: Session) -> None:
    """The prompt's and the answer's full pages are there, of target and drafter; steps are those of a cold run."""
    runner, first = WatchedRunner(session.target, session.drafter), texts(session)[0]
    decoder = caching(session, runner=runner)
    drive(decoder, [turn := session.request(first, greedy(40))])
    known = [*first, *turn.token_ids]
    second = [*known, 5, 6, 7]
    before = runner.computed
    drive(decoder, [again := session.request(second, greedy(40))])
    hit = (len(known) - 1) // P * P
    assert again.num_cached_tokens == hit
    drafted = len(again.steps) + sum(step.proposed for step in again.steps)
    assert runner.computed - before == len(second) - hit + drafted
    assert same(again, alone(session, second, 40))
    assert session.target.model.dtype == torch.float32 or session.target.is_batch_invariant
    metrics = decoder.metrics()
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (len(first) + len(second), hit)


EDGES = [
    (P, DRAFTS),
    (P + 1, DRAFTS),
    (2 * P, 0),
    *(pytest.param(n, 3, marks=pytest.mark.full) for n in (1, P - 1, 3 * P)),
]


@pytest.mark.parametrize(("num_tokens", "length"), EDGES)
def test_the_same_prompt_again(session: Session, num_tokens: int, length: int) -> None:
    """A prompt of whole pages computes its last one, because the logits after it are needed."""
    prompt = texts(session)[0][:num_tokens]
    expected, decoder = alone(session, prompt, 9, length), caching(session, length=length)
    for turn in range(3):
        drive(decoder, [request := session.request(prompt, greedy(9))])
        assert request.num_cached_tokens == (turn > 0) * ((num_tokens - 1) // P * P)
        assert same(request, expected)


SCHEDULES = [(24, 3, 8), *(pytest.param(n, n, 40, marks=pytest.mark.full) for n in (20, 24, 1000))]


@pytest.mark.parametrize(("num_pages", "seed", "num_requests"), SCHEDULES)
def test_any_schedule_is_that_of_requests_alone(session: Session, num_pages: int, seed: int, num_requests: int) -> None:
    """With room for all, and with so little that pages go; some requests are cancelled on their way."""
    rng = random.Random(seed)
    asked = list(chats(session, rng, num_requests))
    num_pages = max(num_pages, max(num_pages_for(len(prompt) + count) for prompt, count in asked))
    cold = {(*prompt, -count): alone(session, prompt, count) for prompt, count in asked}
    decoder = caching(session, num_pages=num_pages, chunk=rng.choice((7, P, 100)))
    requests = [session.request(prompt, greedy(count)) for prompt, count in asked]

    def cancel_one() -> None:
        if rng.random() < 0.05 and not decoder.is_idle:
            decoder.cancel(rng.choice([*decoder.waiting, *decoder.running.values()]))

    drive(decoder, requests, rng, cancel_one)
    for request, (prompt, count) in zip(requests, asked, strict=True):
        expected = cold[(*prompt, -count)]
        if request.finished is FinishReason.CANCELLED:
            assert request.token_ids == expected.token_ids[: len(request.token_ids)]
        else:
            assert same(request, expected)
    assert decoder.metrics().prefix_cache_hits >= P


def test_requests_share_pages_while_they_run(session: Session) -> None:
    """Three with one beginning hold its pages once, and room is counted so."""
    prompt = texts(session)[1][: 4 * P]
    decoder = caching(session, num_pages=5 + 1 + 5)
    first = session.request(prompt, greedy(P))
    decoder.add(first)
    while not first.steps:
        decoder.step()
    others = [session.request([*prompt, 5 + i], greedy(P - 1)) for i in range(2)]
    for other in others:
        decoder.add(other)
    decoder.step()
    assert len(decoder.running) == 3, "shared pages were counted for each"
    assert [other.num_cached_tokens for other in others] == [4 * P, 4 * P]
    drive(decoder, [])
    for request, ids in zip([first, *others], [prompt, [*prompt, 5], [*prompt, 6]], strict=True):
        assert same(request, alone(session, ids, request.params.max_tokens))


@pytest.mark.parametrize(("length", "chunk"), [(0, 1000), (DRAFTS, P + 7)])
def test_requests_that_come_together_share_what_they_begin_with(session: Session, length: int, chunk: int) -> None:
    """The first request computes it; later ones only their own tokens, without waiting for the first answer."""
    text, own = texts(session)[2], range(3)
    prompts_ = [[*text[: 3 * P], 5 + i, *text[: i * P]] for i in own]
    runner = WatchedRunner(session.target, session.drafter)
    decoder = caching(session, length=length, chunk=chunk, runner=runner)
    requests = [session.request(prompt, greedy(P)) for prompt in prompts_]
    for request in requests:
        decoder.add(request)
    num_steps = 0
    while len(decoder.running) < 3:
        decoder.step()
        num_steps += 1
    assert num_steps <= -(-len(prompts_[0]) // chunk) + 1
    drive(decoder, [])
    assert [request.num_cached_tokens for request in requests] == [0, 3 * P, 3 * P]
    drafted = sum(len(request.steps) + sum(step.proposed for step in request.steps) for request in requests)
    assert runner.computed == 3 * P + sum(len(prompt) - 3 * P for prompt in prompts_) + drafted
    for request, prompt in zip(requests, prompts_, strict=True):
        assert same(request, alone(session, prompt, P, length))


def test_the_least_recently_used_go_first(session: Session) -> None:
    """From their ends: what is left of a prefix is of use."""
    one, two, three = (text[: 3 * P + 1] for text in (texts(session)[0], texts(session)[1], texts(session)[0][P:]))
    expected = [alone(session, prompt, 2) for prompt in (one, two, three)]
    decoder = caching(session, num_pages=9)
    for number, hit in ((0, 0), (1, 0), (0, 3), (2, 0), (0, 3), (1, 2), (2, 2), (0, 2)):
        drive(decoder, [request := session.request((one, two, three)[number], greedy(2))])
        assert request.num_cached_tokens == hit * P
        assert same(request, expected[number])


def test_a_new_decoder_finds_nothing_of_the_one_before(session: Session) -> None:
    """It has the same pages, and fills them with its own tokens."""
    prompt = texts(session)[0][: 2 * P + 1]
    for _ in range(2):
        drive(caching(session), [request := session.request(prompt, greedy(20))])
        assert request.num_cached_tokens == 0
    assert same(request, alone(session, prompt, 20))


def test_a_target_with_recurrent_state_caches_no_prefix(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    """The state of its layers after a prefix is not in pages."""
    hybrid = make_target(random_model("qwen3_5_text", **LINEAR), (), NUM_SLOTS)
    mixed = Session(session.manifest, hybrid, session.drafter, None, frozenset(), max_batch_size=NUM_SLOTS)
    caplog.set_level("INFO", "dflash_trt.runtime")
    assert not mixed.decoder(prefix_caching=True).slots.prefix_caching
    assert "prefix caching is off: the target's state is not kept in pages" in caplog.text
    assert session.decoder(prefix_caching=True).slots.prefix_caching
    assert not session.decoder().slots.prefix_caching
