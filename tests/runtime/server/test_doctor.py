# SPDX-License-Identifier: Apache-2.0
"""Probes of `dflash-trt doctor URL` against this server."""

from __future__ import annotations

from typing import Any

import pytest

from dflash_trt.observe.diagnosis.probe_answers import ProbeGroup, ProbePrompt, prompts
from dflash_trt.observe.diagnosis.probes import OUT_OF_TIME, Prober, chats, group, plain
from dflash_trt.observe.endpoints.answer import Answer
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import identify
from tests.runtime.server.live import PATIENCE, Live

FIELDS = ("prompt", "text", "output_tokens", "acceptance", "tau_of_drafting_passes")


def some(asker: Prober) -> ProbeGroup:
    questions = list(prompts().short.items())[:3]

    def ask(name: str, question: ProbePrompt) -> object:
        return lambda: asker.ask(name, question, max_tokens=24)

    return group("some", [ask(name, question) for name, question in questions])  # type: ignore[misc]


def test_a_probe_counts_what_the_server_counts(live: Live) -> None:
    """From the figures of each request, and from the counters around it: the same, to the last token."""
    before = live.llm.metrics()
    with Client(live.url) as client:
        runtime = identify(client)
        assert chats(client, runtime)
        asked = live.llm.metrics()
        asker = Prober(client, runtime, is_chat=False, seconds=PATIENCE)
        found = some(asker)
        after = live.llm.metrics()
        asker._has_own_figures = False
        counted = some(asker)
        undrafted = group("plain", [lambda: asker.ask("p", prompts().short["gcd"], max_tokens=5, draft_length=0)])
    assert asked.finished != before.finished  # whether it chats was asked
    for name in ("drafting_passes", "proposed", "accepted"):
        served = getattr(after.acceptance, name) - getattr(asked.acceptance, name)
        assert getattr(found.acceptance, name) == served > 0
    assert sum(s.output_tokens for s in found.samples) == after.output_tokens - asked.output_tokens
    for one, other in zip(found.samples, counted.samples, strict=True):
        assert [getattr(one, name) for name in FIELDS] == [getattr(other, name) for name in FIELDS]
    assert asker.foreign_tokens == 0
    assert (undrafted.acceptance.drafting_passes, undrafted.tau_of_drafting_passes) == (0, None)


def test_others_tokens_are_told(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(live.url) as client:
        asker = Prober(client, identify(client), is_chat=False, seconds=PATIENCE)
        asker._has_own_figures = False
        answer = client.answer

        def beside(*arguments: Any, **named: Any) -> Answer:
            live.complete(prompt="import os", max_tokens=7, temperature=0, ignore_eos=True)
            return answer(*arguments, **named)

        monkeypatch.setattr(client, "answer", beside)
        some(asker)
    assert asker.foreign_tokens == 3 * 7


def test_the_time_is_bounded(live: Live) -> None:
    with Client(live.url) as client:
        asker = Prober(client, identify(client), is_chat=False, seconds=0)
        assert (plain(asker).samples, plain(asker).why_not) == ([], OUT_OF_TIME)


def test_what_the_server_refuses_ends_the_probe(live: Live) -> None:
    with Client(live.url) as client:
        asker = Prober(client, identify(client), is_chat=True, seconds=PATIENCE)
        question = prompts().short["tea"]
        refused = group("thinking", [lambda: asker.ask("tea", question, max_tokens=4, min_tokens=1)])
    assert refused.samples == []
    assert refused.why_not.startswith("the server refuses it: ")
    assert "min_tokens" in refused.why_not
