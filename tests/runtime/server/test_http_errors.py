# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a request is said in OpenAI's shape, with the field's name, and the server lives."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.runtime.server.live import MODEL, Live

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "x"}]
WRONG: list[tuple[str, Any]] = [
    ("prompt", None), ("prompt", 7), ("prompt", []), ("prompt", ""), ("prompt", [[]]), ("prompt", ["a", 1]),
    ("prompt", {"a": 1}), ("prompt", [1, "a"]), ("prompt", [True]), ("prompt", [10**9]), ("prompt", [-1]),
    ("prompt", [1.5]), ("prompt", "x " * 20000),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True),
    ("temperature", -1), ("temperature", "hot"), ("temperature", []),
    ("top_p", 0), ("top_p", 2), ("top_p", "x"), ("top_k", 1.5), ("top_k", -7), ("min_p", 2), ("min_p", "a"),
    ("seed", -1), ("seed", "x"), ("seed", 2**64), ("stop", 5), ("stop", [""]), ("stop", [1]), ("stop_token_ids", "x"),
    ("stop_token_ids", [-1]), ("presence_penalty", 1e9), ("frequency_penalty", "a"), ("repetition_penalty", 0),
    ("ignore_eos", "yes"), ("draft_length", -1), ("draft_length", 8), ("draft_length", "all"), ("n", 0), ("n", "2"),
    ("n", 1000), ("stream", "yes"), ("stream_options", []), ("stream_options", {"x": 1}), ("return_steps", 1),
    ("logprobs", 21), ("logprobs", -1), ("logprobs", "x"), ("best_of", 2), ("echo", 1), ("suffix", "x"),
    ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"1" * 5000: 1}),
    ("logit_bias", {"5": 10**400}), ("logit_bias", {"10000": 1}), ("logit_bias", [5]),
    ("logit_bias", {str(i): 1 for i in range(1025)}), ("return_tokens_as_token_ids", 1), ("top_logprobs", 2),
    ("tools", [{}]), ("min_tokens", 5), ("no_such_field", 1),
    ("response_format", {"type": "json_object", "schema": {}}),
    ("response_format", "json"), ("response_format", {"type": "xml"}), ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}),
    ("response_format", {"type": "structural_tag", "format": {}}),
    ("structured_outputs", {}), ("structured_outputs", {"regex": "a", "choice": ["a"]}),
    ("structured_outputs", {"regex": "("}), ("structured_outputs", {"regex": 5}), ("structured_outputs", {"x": 5}),
    ("structured_outputs", {"choice": []}), ("structured_outputs", {"choice": [1]}),
    ("structured_outputs", {"json": "{"}), ("structured_outputs", {"json": 7}),
    ("structured_outputs", {"json": "[" * 9999}),
    ("structured_outputs", {"grammar": "root ::= x"}), ("structured_outputs", {"json_object": "yes"}),
    ("structured_outputs", {"regex": "(" * 17 + "a" + ")*" * 17}), ("structured_outputs", {"regex": "a" * 70_000}),
    ("structured_outputs", {"choice": ["a"], "disable_any_whitespace": True}),
    ("structured_outputs", {"grammar": "root ::= root"}), ("structured_outputs", {"json": {"$ref": "#"}}),
    ("guided_regex", "a"), ("guided_json", {}),
    ("model", 5), ("messages", MESSAGES), ("skip_special_tokens", False), ("return_token_ids", True),
    ("request_id", "x"),
]  # fmt: skip
WRONG_CHAT: list[tuple[str, Any]] = [
    ("messages", None), ("messages", []), ("messages", "x"), ("messages", [1]), ("messages", [{}]),
    ("messages", [{"role": "user"}]), ("messages", [{"role": 1, "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("logprobs", 1), ("top_logprobs", 2), ("tool_choice", "required"), ("prompt", "x"), ("echo", True),
    ("max_tokens", 0),
]  # fmt: skip


def check(response: Any, field: str) -> None:
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].startswith(f"{field}: ") or field in error["message"], error
    assert "unknown field" in error["message"] or ("expected" in error["message"] and "found" in error["message"])
    assert len(error["message"]) < 500


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_fields(live: Live, stream: bool) -> None:
    for field, value in WRONG:
        body = json.dumps({"prompt": "def f(", "max_tokens": 4, "stream": stream, field: value})
        check(live.http.post("/v1/completions", content=body, headers={"content-type": "application/json"}), field)


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_chat_fields(live: Live, stream: bool) -> None:
    for field, value in WRONG_CHAT:
        body = json.dumps({"messages": MESSAGES, "max_tokens": 4, "stream": stream, field: value})
        check(live.http.post(CHAT, content=body, headers={"content-type": "application/json"}), field)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"null", b"[]", b"7", b'"x"', b"{}{}", b'{"prompt": NaN}', b'{"prompt":"\xff"}', b"\x00", b"{'a': 1}",
     b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": 1e999}', b'{"prompt": "\\ud800"}',
     "{\"prompt\": \"é\"}".encode("latin-1")],
    ids=lambda body: repr(body[:12]),
)  # fmt: skip
def test_what_is_no_json_object(live: Live, body: bytes) -> None:
    for path in ("/v1/completions", CHAT, "/tokenize"):
        response = live.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_more_tokens_than_there_is_room_for(live: Live) -> None:
    for number in (8192, 10**9, 2**70):
        check(live.post(prompt="def f(", max_tokens=number), "max_position_embeddings")


def test_neutral_and_harmless_fields_are_taken(live: Live) -> None:
    body = {
        "model": MODEL, "prompt": "def f(", "max_tokens": 4, "user": "u", "metadata": {"a": "b"}, "store": True,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}, "best_of": 1,
        "echo": False, "suffix": None, "n": 1, "stop": None, "seed": None, "logprobs": None, "top_logprobs": None,
        "length_penalty": 1.0, "add_special_tokens": True, "skip_special_tokens": True, "return_token_ids": False,
    }  # fmt: skip
    assert live.complete(**body)["usage"]["completion_tokens"] <= 4


def test_stream_options_need_a_stream(live: Live) -> None:
    response = live.post(prompt="x", max_tokens=1, stream_options={"include_usage": True})
    check(response, "stream_options")


def test_a_logit_bias_of_zero_changes_nothing(live: Live) -> None:
    assert live.complete(prompt="x", max_tokens=1, logit_bias={"5": 0})


def test_the_client_raises_its_own_errors(live: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="model: expected tiny, found 'gpt-4'"):
        live.openai().completions.create(model="gpt-4", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        live.openai().completions.create(model=MODEL, prompt="x", temperature=-1)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/page/none", 404),
     ("GET", "/page/../app.py", 404), ("GET", "/page/%2e%2e/app.py", 404), ("DELETE", "/v1/models", 405)],
)  # fmt: skip
def test_what_is_not_there(live: Live, method: str, path: str, status: int) -> None:
    response = live.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_body_says_that_it_is_json(live: Live) -> None:
    """A page of another origin can send anything else without being asked."""
    response = live.http.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": "text/plain"})
    assert response.status_code == 415
