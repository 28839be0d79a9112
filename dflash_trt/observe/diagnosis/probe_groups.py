# SPDX-License-Identifier: Apache-2.0
"""A probe: a handful of requests, one at a time, so that a server's counters tell each one's acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dflash_trt.errors import EndpointError
from dflash_trt.observe.diagnosis.probe_answers import ProbeAnswer, ProbeGroup, ProbePrompt
from dflash_trt.observe.diagnosis.prober import OutOfTimeError, Prober

OUT_OF_TIME = "the diagnosis ran out of time"
REFUSED = "the server refuses it"


def group(name: str, ask: Iterable[Callable[[], ProbeAnswer]]) -> ProbeGroup:
    """Sends requests one by one; a refusal or timeout ends the group and is recorded in it."""
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
