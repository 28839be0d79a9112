# SPDX-License-Identifier: Apache-2.0
"""The client and the meters of `endpoints`, against this server: every figure is the decoder's own."""

from __future__ import annotations

import pytest

from dflash_trt import __version__
from dflash_trt.errors import EndpointError
from dflash_trt.observe.endpoints.client import Client
from dflash_trt.observe.endpoints.identify import identify
from dflash_trt.observe.endpoints.meters import acceptance_during, meter
from tests.runtime.server.live import MODEL, Live


def test_it_is_known(live: Live) -> None:
    with Client(f"{live.url}/v1") as client:
        found = identify(client)
    assert (found.kind, found.version, found.model) == ("dflash-trt", __version__, MODEL)
    assert found.max_model_len == live.llm.backend.max_length


def test_a_streamed_answer_and_its_acceptance(live: Live) -> None:
    body = {"model": MODEL, "prompt": "def f(", "max_tokens": 30, "temperature": 0}
    whole = live.complete(**body)
    before = live.llm.metrics()
    with Client(live.url) as client, acceptance_during(meter(client, identify(client))) as end:
        answer = client.answer(body, is_chat=False)
        found = end()
    after = live.llm.metrics()
    assert (answer.text, answer.finish) == (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"])
    assert answer.output_tokens == whole["usage"]["completion_tokens"]
    assert answer.input_tokens == whole["usage"]["prompt_tokens"]
    assert 0 < answer.emitted[0] <= answer.emitted[-1] <= answer.seconds
    assert found.counts is not None
    for name in ("drafting_passes", "proposed", "accepted"):
        assert getattr(found.counts, name) == getattr(after.acceptance, name) - getattr(before.acceptance, name)
    assert found.output_tokens == after.output_tokens - before.output_tokens == answer.output_tokens
    assert sum(found.counts.accepted_by_position) == found.counts.accepted
    assert answer.acceptance is not None
    assert answer.acceptance.counts == found.counts


def test_a_chat(live: Live) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "temperature": 0}
    with Client(live.url) as client:
        answer = client.answer(body, is_chat=True)
    message = live.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
    assert (answer.text, answer.reasoning) == (message["content"] or "", message.get("reasoning_content") or "")


def test_a_refusal_says_what_the_server_said(live: Live) -> None:
    with Client(live.url) as client, pytest.raises(EndpointError, match="top_logprobs") as error:
        client.answer({"model": MODEL, "prompt": "x", "top_logprobs": 3}, is_chat=False)
    assert error.value.status == 400
