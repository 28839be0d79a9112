# SPDX-License-Identifier: Apache-2.0
"""Asks one server within a time limit, and records the acceptance of each answer, by groups of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from dflash_trt.errors import EndpointError
from dflash_trt.observe.diagnosis.probe_answers import ProbeAnswer, ProbeGroup, ProbePrompt
from dflash_trt.observe.endpoints.answer_stream import Answer
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import Runtime
from dflash_trt.observe.endpoints.meters import acceptance_during, meter
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance

OUT_OF_TIME = "the diagnosis ran out of time"
REFUSED = "the server refuses it"


class OutOfTimeError(Exception):
    """The diagnosis has used its seconds."""


class Prober:
    """Probes one server, for `seconds` seconds in total."""

    def __init__(self, client: Client, runtime: Runtime, *, is_chat: bool, seconds: float) -> None:
        self.runtime = runtime
        self.is_chat = is_chat
        self._client = client
        self._deadline = time.monotonic() + seconds
        self._has_own_figures = True
        self.how = ""
        """The figures from which acceptance was read."""
        self.unreadable = ""
        """Why the server's figures could not be read."""
        self.foreign_tokens = 0
        """Tokens that the server counted beyond ours: another client's."""

    def ask(self, name: str, question: ProbePrompt, *, max_tokens: int, **fields: object) -> ProbeAnswer:
        """Sends one request; raises EndpointError, or OutOfTimeError if no time is left."""
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
        """Output tokens and seconds of concurrent requests; raises like `ask`."""
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


def group(name: str, ask: Iterable[Callable[[], ProbeAnswer]]) -> ProbeGroup:
    """Sends requests one at a time, so that a server's counters tell each one's acceptance.

    A refusal or timeout ends the group and is recorded in it.
    """
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


def greedy_group(
    prober: Prober, name: str, questions: dict[str, ProbePrompt], max_tokens: int, **fields: object
) -> ProbeGroup:
    def request(prompt: str, question: ProbePrompt) -> Callable[[], ProbeAnswer]:
        return lambda: prober.ask(prompt, question, max_tokens=max_tokens, **fields)

    return group(name, [request(prompt, question) for prompt, question in questions.items()])
