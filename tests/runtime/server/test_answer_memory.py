# SPDX-License-Identifier: Apache-2.0
"""Answers take no more memory than was reckoned before they began, and are refused if that is too much."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from dflash_trt.llm import LLM
from tests.runtime.server.live import LONG, Live, serving

CHAT = {"messages": [{"role": "user", "content": "x"}], "logprobs": True}
NUM_TOKENS = 100
FIXED_BYTES = 2**19
"""Bytes of a request and its connection, however long the answer is."""


@pytest.mark.parametrize(
    ("body", "kib_a_token"),
    [
        ({"prompt": "def f(", "draft_length": 0}, 1),
        ({"prompt": "def f(", "logprobs": 20}, 8.9),
        ({"prompt": "def f(" * 20, "logprobs": 5, "echo": True}, 4.2),
        (CHAT | {"top_logprobs": 20, "return_steps": True, "draft_length": 0}, 16.4),
    ],
)
def test_an_answer_takes_no_more_than_it_was_admitted_for(live: Live, body: dict[str, Any], kib_a_token: float) -> None:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 2.0, "seed": 1} | body
    live.post(path, **body | {"max_tokens": 4})  # imports and caches
    tracemalloc.start()
    try:
        assert live.post(path, **body).status_code == 200
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < NUM_TOKENS * kib_a_token * 2**10 + FIXED_BYTES


def test_what_may_take_too_much_is_refused(llm: LLM) -> None:
    with serving(llm, max_answer_bytes=16 * 2**20) as live:
        large = {"prompt": "x", "max_tokens": 1000, "logprobs": 20}
        for stream in (False, True):
            response = live.post(stream=stream, n=2, **large)
            message = "max_tokens: expected at most 14 MiB of answers in one request, found 18"
            assert (response.status_code, response.json()["error"]["message"]) == (400, message)
            assert response.json()["error"]["param"] == "max_tokens"
        response = live.post(prompt="x", max_tokens=10**9)
        assert "max_tokens" not in response.json()["error"]["message"].partition(":")[0], "too long, not too large"
        held = LONG | {"logprobs": 5, "max_tokens": 1000, "n": 2}
        with live.http.stream("POST", "/v1/completions", json=held):
            response = live.post(**large)
            assert response.status_code == 429
            assert "MiB of answers of this client are running or queued" in response.json()["error"]["message"]
            assert live.complete(prompt="x", max_tokens=1)
        live.await_idle()
        assert live.endpoints.answers.by_client == {}
