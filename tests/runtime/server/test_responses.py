# SPDX-License-Identifier: Apache-2.0
"""The Responses API, asked by openai-python's own helper: the same answers as chats."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.runtime.server.live import MODEL, Live

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}


def chat(live: Live, *messages: dict[str, str], **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0} | options
    answer: dict[str, Any] = live.post("/v1/chat/completions", **body).json()
    return answer


def test_an_answer_is_that_of_the_chat(live: Live) -> None:
    response = live.openai().responses.create(input="def f(", instructions="be brief", **GREEDY)
    expected = chat(live, {"role": "system", "content": "be brief"}, {"role": "user", "content": "def f("})
    message = expected["choices"][0]["message"]
    assert response.output_text == (message["content"] or "")
    assert "".join(c.text for i in response.output if i.type == "reasoning" for c in i.content or []) == (
        message.get("reasoning_content") or ""
    )
    assert (response.status, response.object, response.model) == ("incomplete", "response", MODEL)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == expected["usage"]["completion_tokens"] == 24
    assert response.usage.input_tokens == expected["usage"]["prompt_tokens"]
    assert response.usage.total_tokens == expected["usage"]["total_tokens"]


def test_a_stream_adds_up_to_the_whole_answer(live: Live) -> None:
    whole = live.openai().responses.create(input="import os", **GREEDY)
    with live.openai().responses.stream(input="import os", **GREEDY) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    last = events[-1].response  # type: ignore[union-attr]
    assert (last.output_text, last.status, last.usage) == (whole.output_text, whole.status, whole.usage)
    lines = live.post("/v1/responses", input="x", stream=True, **GREEDY).text.split("\n\n")
    assert lines[0].startswith("event: response.created\ndata: {")
    assert lines[-2:] == ["data: [DONE]", ""]


def test_an_answer_can_be_given_back(live: Live) -> None:
    """An answer's items have additional fields; the text is the same as in a chat's messages."""
    client = live.openai()
    first = client.responses.create(input="x = ", **GREEDY)
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "x = "}]}, *first.output]
    second = client.responses.create(input=[*items, {"role": "user", "content": "go on"}], **GREEDY)
    messages = [("user", "x = "), ("assistant", first.output_text), ("user", "go on")]
    expected = chat(live, *({"role": role, "content": text} for role, text in messages))
    assert second.output_text == (expected["choices"][0]["message"]["content"] or "")


def test_a_schema_is_enforced(live: Live) -> None:
    class Flag(BaseModel):
        on: bool

    options = GREEDY | {"max_output_tokens": 400}
    response = live.openai().responses.parse(input="x", text_format=Flag, **options)
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Flag)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input: expected at least 1 item"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, r"input\[0\].type: "),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\].content: "),
        ({"input": [{"role": "user", "content": 5}]}, r"input\[0\].content: "),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id: "),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools: "),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens: "),
        ({"input": "x", "max_tokens": 5}, "max_tokens: unknown field; did you mean max_output_tokens"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "response_format"),
        ({"input": "x", "text": {"formt": {}}}, "text.formt: unknown field; did you mean format"),
        ({"input": "x", "reasoning": {"effort": "extreme"}}, "reasoning_effort: "),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(live: Live, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        live.openai().post("/responses", cast_to=object, body=fields)
