# SPDX-License-Identifier: Apache-2.0
"""Asks servers without and with DFlash the same questions, in turns where both run at once."""

from __future__ import annotations

from itertools import count

from dflash_trt.api.paired_speed import MIN_PAIRS, Pair, Timing, take_turns
from dflash_trt.errors import EndpointError
from dflash_trt.observe.diagnosis.probe_answers import ProbeAnswer, ProbeGroup, prompts
from dflash_trt.observe.diagnosis.prober import OutOfTimeError, Prober, chats
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import identify
from dflash_trt.observe.servers.local_server import RunningServer
from dflash_trt.observe.servers.processor_time import processor_time

MAX_TOKENS = 128
NUM_QUESTIONS = 8
ANSWER_SECONDS = 300.0
"""Time beyond the asked one for answers that have begun."""
QUESTIONS = list(prompts().short.items())[:NUM_QUESTIONS]


class AskedServer:
    """One server, and its answers so far; greedy, with the server's own draft length."""

    def __init__(self, client: Client, server: RunningServer, seconds: float) -> None:
        runtime = identify(client)
        self._prober = Prober(client, runtime, is_chat=chats(client, runtime), seconds=seconds + ANSWER_SECONDS)
        self._process = server.process
        self.answers: list[ProbeAnswer] = []
        self._answer(0)  # warms the server up

    def ask(self, index: int) -> Timing:
        """Asks question `index`; raises EndpointError without an answer."""
        began = processor_time(self._process)
        answer = self._answer(index)
        self.answers.append(answer)
        return Timing(answer.output_tokens, answer.seconds, *(processor_time(self._process) - began))

    @property
    def group(self) -> ProbeGroup:
        return ProbeGroup(name="comparison", samples=self.answers)

    def _answer(self, index: int) -> ProbeAnswer:
        name, question = QUESTIONS[index]
        try:
            answer = self._prober.ask(name, question, max_tokens=MAX_TOKENS, draft_length=None)
        except OutOfTimeError:
            raise EndpointError(f"{name}: no answer of {MAX_TOKENS} tokens within {ANSWER_SECONDS:.0f} s") from None
        if not answer.output_tokens:
            raise EndpointError(f"{name}: the answer has no tokens, so there is no speed to compare")
        return answer


def ask_in_turns(plain: AskedServer, dflash: AskedServer, seconds: float) -> list[Pair]:
    """Pairs from two servers that run at once."""
    return take_turns(plain.ask, dflash.ask, NUM_QUESTIONS, seconds, lambda: dflash.group.tau_of_drafting_passes)


def ask_alone(server: AskedServer, seconds: float, num_answers: int | None = None) -> list[Timing]:
    """Answers of one server: `num_answers`, or whole rounds of questions in `seconds` and at least MIN_PAIRS."""
    timings: list[Timing] = []
    used = 0.0
    for index in count():
        is_round = index % NUM_QUESTIONS == 0
        if index == num_answers or (num_answers is None and is_round and index >= MIN_PAIRS and used >= seconds):
            return timings
        timings.append(server.ask(index % NUM_QUESTIONS))
        used += timings[-1].seconds
    raise AssertionError
