# SPDX-License-Identifier: Apache-2.0
"""/v1/responses by the official client: the answers of a chat, as items and as events."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pydantic
import pytest
from openai import BadRequestError

from dflash_trt.api.sampling_params import SamplingParams
from tests.runtime.server.live import MODEL, Live
from tests.runtime.server.test_tools import SCHEMA, TOOLS

FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
CONVERSATION: Any = [
    {"role": "developer", "content": "code"},
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "id": "r", "summary": []},
    {"type": "function_call", "call_id": "1", "name": "get_time", "arguments": '{"zone": "utc"}'},
    {"type": "function_call", "call_id": "2", "name": "stop_clock", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "noon"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is noon."}]},
    {"role": "user", "content": "and now?"},
]
MESSAGES = [
    {"role": "system", "content": "be brief"}, {"role": "system", "content": "code"}, {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "get_time", "arguments": {"zone": "utc"}}},
        {"function": {"name": "stop_clock", "arguments": {}}},
    ]},
    {"role": "tool", "content": "noon"}, {"role": "assistant", "content": "It is noon."},
    {"role": "user", "content": "and now?"},
]  # fmt: skip


def test_text(live: Live) -> None:
    create = live.openai().responses.create
    given = create(model=MODEL, input="x", max_output_tokens=9, temperature=0)
    expected = live.llm.chat([{"role": "user", "content": "x"}], SamplingParams(max_tokens=9))[0]
    assert (given.output_text, given.status) == (expected.text, "incomplete")
    assert given.incomplete_details is not None
    assert given.incomplete_details.reason == "max_output_tokens"
    assert given.usage is not None
    assert (given.usage.output_tokens, given.usage.total_tokens) == (9, given.usage.input_tokens + 9)
    assert expected.acceptance is not None
    metrics: Any = given.to_dict()["metrics"]
    assert metrics["speculative_decoding"]["num_spec_steps"] == expected.acceptance.drafting_passes
    settings: Any = {"text": {"verbosity": "medium"}, "reasoning": {"summary": "auto"}}
    settings |= {"instructions": "be brief", "input": CONVERSATION, "max_output_tokens": 9, "temperature": 0}
    expected = live.llm.chat(MESSAGES, SamplingParams(max_tokens=9))[0]
    assert create(model=MODEL, **settings).output_text == expected.text


def test_streamed_text(live: Live) -> None:
    settings: Any = {"model": MODEL, "input": "x", "temperature": 0}
    settings["extra_body"] = {"structured_outputs": {"regex": "[a-z_]{40}"}}
    client = live.openai()
    with client.responses.stream(**settings) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = client.responses.create(**settings)
    assert final.output_text == whole.output_text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )  # fmt: skip
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.usage == whole.usage
    speculative: list[Any] = [response.to_dict()["metrics"] for response in (final, whole)]
    assert speculative[0]["speculative_decoding"] == speculative[1]["speculative_decoding"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_time"}], ids=str)
def test_tools(live: Live, choice: Any) -> None:
    settings: Any = {"model": MODEL, "input": "x", "tools": FLAT, "tool_choice": choice, "parallel_tool_calls": False}
    settings["extra_body"] = {"seed": 3}
    client = live.openai()
    (item,) = client.responses.create(**settings).output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), SCHEMA if item.name == "get_time" else {})
    events = list(client.responses.create(stream=True, **settings))
    last = events[-1]
    assert last.type == "response.completed"
    (streamed,) = last.response.output
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (item.name, item.arguments)
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [item.arguments]


def test_a_class_of_the_client(live: Live) -> None:
    class Answer(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=8)

    given = live.openai().responses.parse(model=MODEL, input="x", text_format=Answer, temperature=0)
    assert isinstance(given.output_parsed, Answer)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"store": True}, "store: expected False"), ({"previous_response_id": "x"}, "previous_response_id: unknown field"),
     ({"conversation": "x"}, "conversation: unknown"), ({"background": True}, "background: "), ({"n": 2}, "n: unknown"),
     ({"input": []}, "input: "), ({"input": 5}, "input: "), ({"input": [5]}, "input: "),
     ({"input": [{}]}, "- input: "),
     ({"input": [{"type": "item_reference", "id": "x"}]}, "input: expected items of type"),
     ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input: expected parts"),
     ({"input": [{"type": "function_call"}]}, "input: expected calls"),
     ({"tools": [{"type": "web_search"}]}, 'tools: expected {"type": "function", "name"'),
     ({"reasoning": {"effort": 5}}, "- reasoning.effort: "),
     ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "- input: expected a JSON object"),
     ({"reasoning": {"mode": "pro"}}, "reasoning.mode: unknown field"), ({"reasoning": "x"}, "reasoning: "),
     ({"text": {"verbosity": "low"}}, "text.verbosity: expected medium"), ({"text": {"x": 1}}, "text.x: unknown"),
     ({"text": {"format": {"type": "xml"}}}, "- text.format: "),
     ({"tools": 5}, "tools: "), ({"max_output_tokens": 0}, "- max_output_tokens: "),
     ({"instructions": 5}, "- instructions: "),
     ({"input": "x " * 20_000}, "- input: expected at most"), ({"truncation": "auto"}, "truncation: ")],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(live: Live, fields: dict[str, Any], words: str, stream: bool) -> None:
    body: dict[str, Any] = {"input": "x", "max_output_tokens": 1, **fields}
    with pytest.raises(BadRequestError, match=words):
        live.openai().post("/responses", body={**body, "stream": stream}, cast_to=object)
