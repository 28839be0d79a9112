# SPDX-License-Identifier: Apache-2.0
"""Invalid and oversized requests get errors in OpenAI's shape that name the field, and the server goes on."""

from __future__ import annotations

import json
import random
import threading
from functools import wraps
from typing import Any

import h11
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.api.chat_template import render_chat
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server.connections.parser import MAX_HEADERS, LimitedConnection
from dflash_trt.runtime.server.http_error import HttpError
from dflash_trt.runtime.server.request import body as request_body
from dflash_trt.runtime.server.request import messages as conversations
from dflash_trt.runtime.server.request import tokenizing
from dflash_trt.runtime.server.request.body import decode_object
from tests.runtime.server.live import MODEL, Live

CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
TEXTS = st.text('ab"\\[]{},:é\n', max_size=4)
DOCUMENTS = st.dictionaries(
    TEXTS,
    st.recursive(
        st.one_of(TEXTS, st.integers(), st.none()),
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    ),
    max_size=6,
)


def count(value: object) -> tuple[int, int]:
    """Texts, lists and objects of a document; and its levels."""
    if isinstance(value, str | int | None):
        return int(isinstance(value, str)), 0
    assert isinstance(value, list | dict)
    parts = [*value, *value.values()] if isinstance(value, dict) else value
    counts = [count(part) for part in parts]
    return 1 + sum(items for items, _ in counts), 1 + max((levels for _, levels in counts), default=0)


@settings(max_examples=15)
@given(DOCUMENTS, st.booleans())
def test_what_is_beyond_a_limit_is_not_made(document: Any, is_ascii: bool) -> None:
    num_items, num_levels = count(document)
    encoded = json.dumps(document, ensure_ascii=is_ascii)
    for name, number in (("MAX_ITEMS", num_items), ("MAX_NESTING", num_levels)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(request_body, name, number)
            assert decode_object(encoded) == document
            patch.setattr(request_body, name, number - 1)
            with pytest.raises(HttpError, match=f"body: it has more than {number - 1} "):
                decode_object(encoded)


def test_numbers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "MAX_VALUES", 100)
    assert decode_object(json.dumps({"prompt": [1] * 100, "model": "," * 200}).encode())
    with pytest.raises(HttpError, match="field: it has more than 100 values"):
        decode_object(json.dumps({"prompt": [1] * 102}), "field")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_each_path_is_bounded(live: Live, path: str) -> None:
    """960 levels ended in a 500: an error quoted them."""
    nested = b"[" * 960 + b"]" * 960
    for value, limit in ((nested, "128 levels"), (json.dumps(["x"] * 70_000).encode(), "65536 texts")):
        body = b'{"prompt": %b}' % value
        response = live.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(f"body: it has more than {limit}")


def test_arguments_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both the arguments of each call, a document of their own, and all arguments of a conversation."""
    calls: list[Any] = [{"type": "function", "function": {"name": "f", "arguments": '{"a": "%s"}' % ("x" * 50)}}] * 2
    messages = [{"role": "assistant", "content": "", "tool_calls": calls[:1]} for _ in range(2)]
    assert len(conversations.read_messages(messages)) == 2
    monkeypatch.setattr(conversations, "MAX_ARGUMENT_CHARACTERS", 100)
    assert len(conversations.read_messages(messages[:1])) == 1
    for wrong in (messages, [messages[0] | {"tool_calls": calls}]):
        with pytest.raises(RequestError, match="messages: arguments have more than 100 characters"):
            conversations.read_messages(wrong)
    calls[0]["function"]["arguments"] = "[" * 9 + "]" * 9
    monkeypatch.setattr(request_body, "MAX_NESTING", 8)
    with pytest.raises(HttpError, match="arguments: it has more than 8 levels"):
        conversations.read_messages(messages[:1])


def test_variables_of_a_template_are_bounded(live: Live) -> None:
    """Half a million took 48 s."""
    response = live.post("/v1/chat/completions", **CHAT_BODY, chat_template_kwargs={f"a{i}": 1 for i in range(65)})
    assert response.json()["error"]["message"] == "chat_template_kwargs: expected at most 64 items, found 65"


def test_what_is_long_to_render_does_not_hold_up_short_prompts(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def render(*args: Any, **kwargs: Any) -> str:
        threads.append(threading.current_thread().name)
        return render_chat(*args, **kwargs)

    monkeypatch.setattr(tokenizing, "render_chat", render)
    for size in (1, tokenizing.CHUNK_CHARACTERS):
        for path, body in (("/v1/chat/completions", CHAT_BODY), ("/tokenize", {"messages": CHAT_BODY["messages"]})):
            message = body["messages"][0] | {"name": "x" * size}
            assert live.post(path, **body | {"messages": [message]}).status_code == 200
    names = [name.partition("_")[0] for name in threads]
    assert names == ["dflash-trt tokenizer"] * 2 + ["dflash-trt long prompts"] * 2


def test_the_failing_message_is_found_in_few_steps(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four of them held the tokenising thread for 9 s, with large tools."""
    tokenizer, num_steps = live.llm.backend.tokenizer, 0
    render = tokenizer.apply_chat_template

    @wraps(render)
    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return render(*args, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    messages = [{"role": "user", "content": "x"}] * 300
    for index in (0, 1, 150, 299):
        num_steps = 0
        wrong = [*messages[:index], {"role": "user", "content": "x", "tool_calls": 5}, *messages[index + 1 :]]
        with pytest.raises(RequestError, match=rf"messages\[{index}\]: expected what the chat template takes"):
            render_chat(tokenizer, wrong)
        assert num_steps <= 10


HEAD = b"POST /x HTTP/1.1\r\nhost: x\r\n"


def fields(rng: random.Random) -> bytes:
    return b"".join(b"h%d: 0\r\n" % number for number in range(rng.randrange(MAX_HEADERS - 3)))


def request(rng: random.Random) -> bytes:
    body = b"".join(rng.choice([b"0", b"0a", b";", b"0\n", b"0;\r\n"]) for _ in range(rng.randrange(600)))
    if rng.random() < 0.5:
        return HEAD + fields(rng) + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    chunks = []
    while body:
        chunk, body = body[: (size := rng.randrange(1, 80))], body[size:]
        chunks.append(rng.choice([b"%x", b"0%x", b"%X;a=b"]) % len(chunk) + b"\r\n%b\r\n" % chunk)
    last = rng.choice([b"0", b"0" * 20, b"0;x=y"]) + b"\r\n"
    return HEAD + fields(rng) + b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunks) + last + fields(rng) + b"\r\n"


def events(connection: h11.Connection, pieces: list[bytes]) -> list[object]:
    """Events of a server that answers each request once it is whole."""
    found: list[object] = []
    for piece in pieces:
        connection.receive_data(piece)
        while (event := connection.next_event()) is not h11.NEED_DATA:
            found.append(event)
            if isinstance(event, h11.EndOfMessage):
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
    return found


@pytest.mark.parametrize("seed", range(15))
def test_events_are_those_of_h11(seed: int) -> None:
    rng = random.Random(seed)
    sent = b"".join(request(rng) for _ in range(3))
    cuts = sorted(rng.randrange(len(sent)) for _ in range(rng.choice([0, 3, 40, len(sent) // 4])))
    pieces = [sent[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True) if begin < end]
    found = events(LimitedConnection(), pieces)
    assert found == events(h11.Connection(h11.SERVER), pieces)
    assert sum(isinstance(event, h11.Request) for event in found) == 3


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
    ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("logprobs", "x"), ("best_of", 2), ("echo", 1),
    ("suffix", "x"),
    ("logit_bias", {"5": 101}), ("logit_bias", {"x": 1}), ("logit_bias", {"1" * 5000: 1}),
    ("logit_bias", {"5": 10**400}), ("logit_bias", {"10000": 1}), ("logit_bias", [5]),
    ("logit_bias", {str(i): 1 for i in range(1025)}), ("return_tokens_as_token_ids", 1), ("top_logprobs", 2),
    ("tools", [{}]), ("min_tokens", -1), ("min_tokens", 99), ("min_tokens", "5"), ("no_such_field", 1),
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
    ("structured_outputs", {"regex": "(" * 33 + "a" + ")*" * 33}), ("structured_outputs", {"regex": "a" * 70_000}),
    ("structured_outputs", {"choice": ["a"], "disable_any_whitespace": True}),
    ("structured_outputs", {"grammar": "root ::= root"}), ("structured_outputs", {"json": {"$ref": "#"}}),
    ("guided_regex", "a"), ("guided_json", {}),
    ("model", 5), ("messages", MESSAGES), ("skip_special_tokens", False), ("return_token_ids", True),
    ("session_id", "x"),
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
    assert len(field) + 10 < len(error["message"]) < 500


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


def test_stream_options_need_a_stream_and_tokens_room(live: Live) -> None:
    check(live.post(prompt="x", max_tokens=1, stream_options={"include_usage": True}), "stream_options")
    for number in (8192, 10**9, 2**70):
        check(live.post(prompt="def f(", max_tokens=number), "max_position_embeddings")


def test_neutral_and_harmless_fields_are_taken(live: Live) -> None:
    body = {
        "model": MODEL, "prompt": "def f(", "max_tokens": 4, "user": "u", "metadata": {"a": "b"}, "store": True,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "best_of": 1,
        "echo": False, "suffix": None, "n": 1, "stop": None, "seed": None, "logprobs": None, "top_logprobs": None,
        "length_penalty": 1.0, "add_special_tokens": True, "skip_special_tokens": True, "return_token_ids": False,
        "structured_outputs": None, "stream_options": None, "temperature": None, "stream": None,
    }  # fmt: skip
    assert live.complete(**body | {"response_format": None})["usage"]["completion_tokens"] <= 4
    others = {
        "separate_reasoning": True, "stream_reasoning": True, "early_stopping": False, "no_stop_trim": False,
        "typical_p": 1.0, "top_a": 0, "mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0,
    }  # fmt: skip
    chat = CHAT_BODY | {"max_tokens": 1, "add_generation_prompt": True}
    assert live.post("/v1/chat/completions", **chat | others).status_code == 200
    for name in others:
        wrong = live.post("/v1/chat/completions", **chat | {name: 0.5})
        assert wrong.json()["error"]["param"] == name
    tokenize = {"messages": CHAT_BODY["messages"], "add_generation_prompt": True}
    assert live.post("/tokenize", **tokenize).status_code == 200
    for name, value in (("add_generation_prompt", False), ("add_generation_promt", True)):
        assert live.post("/tokenize", **tokenize | {name: value}).json()["error"]["param"] == name
    for bias in ({}, {"5": 0}):
        assert live.complete(**body, logit_bias=bias)["usage"]["completion_tokens"] <= 4


def test_the_client_raises_its_own_errors(live: Live) -> None:
    with pytest.raises(openai.NotFoundError, match="model: 'gpt-4' is not served here, only tiny"):
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
