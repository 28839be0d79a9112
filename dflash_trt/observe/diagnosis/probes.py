# SPDX-License-Identifier: Apache-2.0
"""The probes, each a handful of requests, one at a time, so that a server's counters tell each one's acceptance."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean
from zlib import crc32

import msgspec

from dflash_trt.errors import EndpointError
from dflash_trt.observe.diagnosis.probe_answers import ProbeAnswer, ProbeGroup, ProbePrompt, passage, prompts
from dflash_trt.observe.endpoints.client import Answer, Client
from dflash_trt.observe.endpoints.identify import Runtime
from dflash_trt.observe.endpoints.meters import acceptance_during, meter
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance

SHORT_TOKENS = 64
TOKENS = 48
PREFIX_TOKENS = 512
"""More than a page of a prefix cache, of most models."""
NUM_PREFIXES = 8
NUM_PAIRED = 6
"""Short prompts that are asked again in another way."""
NUM_LONG = 8
LONG_TOKENS = 6000
"""Length of a long prompt: beyond the windows of 2048 and 4096 tokens that drafters are trained with."""
NUM_THINKING = 6
BATCH = 16
ROUNDS = 5
LOAD_TOKENS = 32
MIN_LONG = 512
OUT_OF_TIME = "the diagnosis ran out of time"
REFUSED = "the server refuses it"
NO_PLAIN = "this runtime decodes no single request without drafts"


class OutOfTimeError(Exception):
    """The diagnosis has used its seconds."""


class Prober:
    """Asks one server, for so many seconds in all."""

    def __init__(self, client: Client, runtime: Runtime, *, is_chat: bool, seconds: float) -> None:
        self.runtime = runtime
        self.is_chat = is_chat
        self._client = client
        self._deadline = time.monotonic() + seconds
        self._has_own_figures = True
        self.how = ""
        """From which figures acceptance was read."""
        self.unreadable = ""
        """Why figures that the server publishes could not be read."""
        self.foreign_tokens = 0
        """Tokens that the server counted beyond ours: another client's."""

    def ask(self, name: str, question: ProbePrompt, *, max_tokens: int, **fields: object) -> ProbeAnswer:
        """One request; raises EndpointError, and OutOfTimeError before one that has no time left."""
        body = self._body(question, max_tokens, fields)
        if not self._has_own_figures:
            try:
                with acceptance_during(meter(self._client, self.runtime)) as end:
                    answer = self._answer(body)
                observed = end()
            except EndpointError:
                self._left()  # cut off because the time is over
                raise
            self._left()
            return self._sample(name, answer, observed)
        answer = self._answer(body)
        if answer.acceptance is None:  # no figures per request: use the server's counters
            self._has_own_figures = False
            return self.ask(name, question, max_tokens=max_tokens, **fields)
        return self._sample(name, answer, answer.acceptance)

    def ask_together(self, questions: list[ProbePrompt], *, max_tokens: int, **fields: object) -> tuple[int, float]:
        """Output tokens and seconds of requests that run at the same time; raises as `ask`."""
        self._left()
        bodies = [self._body(question, max_tokens, fields) for question in questions]
        began = time.perf_counter()
        with ThreadPoolExecutor(len(bodies)) as threads:
            answers = list(threads.map(self._answer, bodies))
        return sum(answer.output_tokens or len(answer.emitted) for answer in answers), time.perf_counter() - began

    def prompt(self, question: ProbePrompt) -> str:
        return question.chat if self.is_chat else question.text

    def _body(self, question: ProbePrompt, max_tokens: int, fields: dict[str, object]) -> dict[str, object]:
        body: dict[str, object] = {"model": self.runtime.model, "max_tokens": max_tokens, "temperature": 0}
        if self.runtime.kind == "dflash-trt" and self.runtime.num_draft_tokens:
            body["draft_length"] = self.runtime.num_draft_tokens  # the draft is judged, not the policy
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": question.chat}]
        else:
            body["prompt"] = question.text
        return {key: value for key, value in (body | fields).items() if value is not None}

    def _answer(self, body: dict[str, object]) -> Answer:
        try:
            return self._client.answer(body, is_chat=self.is_chat, deadline_seconds=self._left())
        except EndpointError:
            self._left()  # an answer that was cut off because the time is over
            raise

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise OutOfTimeError
        return left

    def _sample(self, name: str, answer: Answer, observed: ObservedAcceptance) -> ProbeAnswer:
        self.how = observed.how
        if observed.source == "unreadable":
            self.unreadable = observed.how
        tokens = answer.output_tokens or len(answer.emitted)
        if observed.output_tokens is not None:
            self.foreign_tokens += max(0, observed.output_tokens - tokens)
        return ProbeAnswer(
            prompt=name, text=hashlib.sha256(text_of(answer).encode()).hexdigest(), output_tokens=tokens,
            input_tokens=answer.input_tokens, cached_tokens=answer.cached_tokens, seconds=answer.seconds,
            acceptance=observed.counts, tau_of_drafting_passes=observed.tau_of_drafting_passes,
        )  # fmt: skip


def text_of(answer: Answer) -> str:
    return f"{answer.reasoning}\0{answer.text}" if answer.reasoning else answer.text


def chats(client: Client, runtime: Runtime) -> bool:
    """Whether the server answers chats; raises EndpointError for any other fault."""
    body = {"model": runtime.model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
    try:
        client.answer(body, is_chat=True, deadline_seconds=60)
    except EndpointError as error:
        if error.status in (400, 404, 422, 500, 501):  # no chat template: vLLM 400, Triton 500
            return False
        raise
    return True


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens a second of all requests together, once for each round."""

    concurrency: int
    draft_length: int | None
    """At most so many drafts a step, 0 being plain decoding; None: what the server chooses."""
    tokens_per_second: list[float]


def group(name: str, ask: Iterable[Callable[[], ProbeAnswer]]) -> ProbeGroup:
    """Asks one by one; a refusal or the end of the time ends the group and is noted in it."""
    samples: list[ProbeAnswer] = []
    try:
        for each in ask:
            samples.append(each())
    except OutOfTimeError:
        return ProbeGroup(name=name, samples=samples, why_not=OUT_OF_TIME)
    except EndpointError as error:
        if error.status not in (400, 422):
            raise
        return ProbeGroup(name=name, samples=samples, why_not=f"{REFUSED}: {error}")
    return ProbeGroup(name=name, samples=samples)


def short(prober: Prober) -> ProbeGroup:
    """Sixteen short prompts, greedy: what everything else is compared with."""
    return _greedy(prober, "short prompts", prompts().short, SHORT_TOKENS)


def served(prober: Prober) -> ProbeGroup:
    """The first of the same with as many drafts as the server chooses, where requests may ask for more."""
    if prober.runtime.kind != "dflash-trt":
        return ProbeGroup(name="as served", why_not="the short prompts are", is_left_out=True)
    some = dict(list(prompts().short.items())[:NUM_PAIRED])
    return _greedy(prober, "as served", some, SHORT_TOKENS, draft_length=None)


def plain(prober: Prober) -> ProbeGroup:
    """The first of the same without drafts, where a request may say so."""
    if prober.runtime.kind != "dflash-trt":
        return ProbeGroup(name="plain decoding", why_not=NO_PLAIN, is_left_out=True)
    some = dict(list(prompts().short.items())[:NUM_PAIRED])
    return _greedy(prober, "plain decoding", some, SHORT_TOKENS, draft_length=0)


def foreign(prober: Prober) -> ProbeGroup:
    """Chinese, German, Japanese and Spanish."""
    return _greedy(prober, "other languages", prompts().foreign, TOKENS)


def prefixes(prober: Prober, reference: ProbeGroup) -> tuple[ProbeGroup, ProbeGroup]:
    """Prompts that no cache can know, then the same again."""
    nonce = secrets.token_hex(4)
    characters = int(PREFIX_TOKENS * _characters_per_token(prober, reference))
    questions: dict[str, ProbePrompt] = {}
    for index in range(NUM_PREFIXES):
        name = f"prefix-{index}"
        prompt = passage(index, NUM_PREFIXES, characters)
        questions[name] = ProbePrompt(f"[{nonce}-{index}] {prompt.chat}", f"# {nonce}-{index}\n{prompt.text}")
    first = _greedy(prober, "new prefixes", questions, TOKENS)
    return first, _greedy(prober, "the same again", questions, TOKENS)


def long(prober: Prober, reference: ProbeGroup, num_tokens: int | None) -> ProbeGroup:
    """Prompts of `num_tokens`, or of LONG_TOKENS where model and draft have positions for as many.

    Positions beyond those that RoPE scaling begins with are asked for only where `num_tokens` says so: what a model was
    trained on is not known there.
    """
    room = prober.runtime.max_model_len or (num_tokens or LONG_TOKENS) + 4 * TOKENS
    unscaled = room if num_tokens else prober.runtime.unscaled_length or room
    wanted = min(num_tokens or LONG_TOKENS, room - 4 * TOKENS, unscaled - TOKENS)
    if wanted < MIN_LONG:
        name = "RoPE scaling begins at" if unscaled < room else "the model has room for"
        why_not = f"{name} {min(room, unscaled)} tokens: --long-tokens asks for more"
        return ProbeGroup(name="long prompts", why_not=why_not, is_left_out=True)
    found = _long(prober, reference, wanted)
    while (
        not (found.samples or num_tokens) and found.why_not.startswith(REFUSED) and (wanted := wanted // 2) >= MIN_LONG
    ):
        found = _long(prober, reference, wanted)  # a server need not say how long prompts may be
    return found


def _long(prober: Prober, reference: ProbeGroup, num_tokens: int) -> ProbeGroup:
    characters = int(num_tokens * _characters_per_token(prober, reference))
    passages = [passage(index, NUM_LONG, characters) for index in range(NUM_LONG)]
    # Another release of this package has other passages: their names say so when two diagnoses are compared.
    questions = {f"long-{index}-{crc32(prompt.text.encode()):08x}": prompt for index, prompt in enumerate(passages)}
    return _greedy(prober, "long prompts", questions, TOKENS)


def sampled(prober: Prober) -> tuple[ProbeGroup, ProbeGroup]:
    """Short prompts at temperature 1 with two seeds."""
    some = dict(list(prompts().short.items())[-NUM_PAIRED:])
    first, second = (
        _greedy(prober, f"temperature 1, seed {seed}", some, TOKENS, temperature=1.0, seed=seed) for seed in (1, 2)
    )
    return first, second


def thinking(prober: Prober) -> tuple[ProbeGroup, ProbeGroup]:
    """Chats with thinking on and off, as templates of Qwen and others have it."""
    some = dict(list(prompts().short.items())[-NUM_THINKING:])
    names = ("thinking on", "thinking off")
    if not prober.is_chat:
        on, off = (ProbeGroup(name=name, why_not="it serves no chats") for name in names)
        return on, off
    on, off = (
        _greedy(prober, name, some, TOKENS, chat_template_kwargs={"enable_thinking": is_on})
        for name, is_on in zip(names, (True, False), strict=True)
    )
    return on, off


def draft_lengths(prober: Prober, num_draft_tokens: int) -> list[int | None]:
    """Lengths whose speeds can be asked for; None: the server's choice."""
    return [None, 0, max(1, num_draft_tokens // 2)] if prober.runtime.kind == "dflash-trt" else [None]


def speeds(prober: Prober, lengths: list[int | None]) -> tuple[list[Speed], str]:
    """One request and sixteen at a time, with each length in turns whose order changes; also why some are missing."""
    questions = list(prompts().short.values())
    measured: dict[tuple[int, int | None], list[float]] = {}
    why_not = ""
    try:
        for concurrency in (1, BATCH):
            for turn in range(ROUNDS + 1):
                for length in lengths if turn % 2 else lengths[::-1]:
                    asked = questions[:concurrency]
                    tokens, seconds = prober.ask_together(asked, max_tokens=LOAD_TOKENS, draft_length=length)
                    if turn > 0:  # the first warms up: graphs are captured, draft lengths found
                        measured.setdefault((concurrency, length), []).append(tokens / seconds)
    except OutOfTimeError:
        why_not = OUT_OF_TIME
    except EndpointError as error:
        if error.status != 429:
            raise
        why_not = f"the server refuses {BATCH} requests at a time"
    return [
        Speed(concurrency=concurrency, draft_length=length, tokens_per_second=rates)
        for (concurrency, length), rates in measured.items()
    ], why_not


def _characters_per_token(prober: Prober, reference: ProbeGroup) -> float:
    """By the server's token counts of the reference, template included; at most 3, so that no prompt is too long."""
    sizes = [
        len(prober.prompt(prompts().short[sample.prompt])) / sample.input_tokens
        for sample in reference.samples
        if sample.input_tokens
    ]
    return min(3.0, fmean(sizes) if sizes else 3.0)


def _greedy(
    prober: Prober, name: str, questions: dict[str, ProbePrompt], max_tokens: int, **fields: object
) -> ProbeGroup:
    def request(prompt: str, question: ProbePrompt) -> Callable[[], ProbeAnswer]:
        return lambda: prober.ask(prompt, question, max_tokens=max_tokens, **fields)

    return group(name, [request(prompt, question) for prompt, question in questions.items()])
