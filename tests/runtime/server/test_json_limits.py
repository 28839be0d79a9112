# SPDX-License-Identifier: Apache-2.0
"""Documents that would hold up all other work while Python makes, prints or renders them."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.api import chat_template
from dflash_trt.api.chat_template import render_chat
from dflash_trt.errors import RequestError
from dflash_trt.runtime.server import limits, requests, tokenizing
from dflash_trt.runtime.server.http_error import HttpError
from dflash_trt.runtime.server.limits import decode_object
from tests.runtime.server.live import Live

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
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


@settings(max_examples=30, deadline=None)
@given(DOCUMENTS, st.booleans())
def test_what_is_beyond_a_limit_is_not_made(document: Any, is_ascii: bool) -> None:
    num_items, num_levels = count(document)
    encoded = json.dumps(document, ensure_ascii=is_ascii)
    for name, number in (("MAX_ITEMS", num_items), ("MAX_NESTING", num_levels)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, name, number)
            assert decode_object(encoded) == document
            patch.setattr(limits, name, number - 1)
            with pytest.raises(HttpError, match=f"body: expected at most {number - 1} "):
                decode_object(encoded)


def test_numbers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_VALUES", 100)
    assert decode_object(json.dumps({"prompt": [1] * 100, "model": "," * 200}).encode())
    with pytest.raises(HttpError, match="field: expected at most 100 values"):
        decode_object(json.dumps({"prompt": [1] * 102}), "field")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_each_path_is_bounded(live: Live, path: str) -> None:
    """960 levels ended in a 500: an error quoted them."""
    nested = b"[" * 960 + b"]" * 960
    for value, limit in ((nested, "128 levels"), (json.dumps(["x"] * 70_000).encode(), "65536 texts")):
        body = b'{"prompt": %b}' % value
        response = live.http.post(path, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(f"body: expected at most {limit}")


def test_arguments_are_bounded(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call's, which are a document of their own, and those of a conversation together."""
    calls: list[Any] = [{"type": "function", "function": {"name": "f", "arguments": '{"a": "%s"}' % ("x" * 50)}}] * 2
    messages = [{"role": "assistant", "content": "", "tool_calls": calls[:1]} for _ in range(2)]
    assert len(requests.read_messages(messages)) == 2
    monkeypatch.setattr(requests, "MAX_ARGUMENT_CHARACTERS", 100)
    assert len(requests.read_messages(messages[:1])) == 1
    for wrong in (messages, [messages[0] | {"tool_calls": calls}]):
        with pytest.raises(RequestError, match="messages: expected at most 100 characters of arguments"):
            requests.read_messages(wrong)
    calls[0]["function"]["arguments"] = "[" * 9 + "]" * 9
    monkeypatch.setattr(limits, "MAX_NESTING", 8)
    with pytest.raises(HttpError, match="arguments: expected at most 8 levels"):
        requests.read_messages(messages[:1])


def test_variables_of_a_template_are_bounded(live: Live) -> None:
    """Half a million took 48 s."""
    response = live.post("/v1/chat/completions", **CHAT, chat_template_kwargs={f"a{i}": 1 for i in range(65)})
    assert response.json()["error"]["message"] == "chat_template_kwargs: expected at most 64 items, found 65"


def test_what_is_long_to_render_does_not_hold_up_short_prompts(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def render(*args: Any, **kwargs: Any) -> str:
        threads.append(threading.current_thread().name)
        return render_chat(*args, **kwargs)

    monkeypatch.setattr(tokenizing, "render_chat", render)
    for size in (1, tokenizing.CHUNK_CHARACTERS):
        for path, body in (("/v1/chat/completions", CHAT), ("/tokenize", {"messages": CHAT["messages"]})):
            message = body["messages"][0] | {"name": "x" * size}
            assert live.post(path, **body | {"messages": [message]}).status_code == 200
    names = [name.partition("_")[0] for name in threads]
    assert names == ["dflash-trt tokenizer"] * 2 + ["dflash-trt long prompts"] * 2


def test_the_failing_message_is_found_in_few_steps(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four of them held the tokenising thread for 9 s, with large tools."""
    render, num_steps = chat_template._render, 0

    def counted(*args: Any) -> str:
        nonlocal num_steps
        num_steps += 1
        return render(*args)

    monkeypatch.setattr(chat_template, "_render", counted)
    messages = [{"role": "user", "content": "x"}] * 300
    for index in (0, 1, 150, 299):
        num_steps = 0
        wrong = [*messages[:index], {"role": "user", "content": "x", "tool_calls": 5}, *messages[index + 1 :]]
        with pytest.raises(RequestError, match=rf"messages\[{index}\]: expected what the chat template takes"):
            render_chat(live.llm.backend.tokenizer, wrong)
        assert num_steps <= 10
