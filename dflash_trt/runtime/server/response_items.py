# SPDX-License-Identifier: Apache-2.0
"""/v1/responses as a chat: items of the input become messages, and the answer becomes items and their events.

Nothing is stored, so a conversation is sent whole each time.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.server.http_error import HttpError

Json = dict[str, Any]
SAME_FIELDS = {
    "model", "temperature", "top_p", "parallel_tool_calls", "stream", "user", "metadata", "service_tier",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "top_k", "min_p", "seed", "stop",
    "stop_token_ids", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "ignore_eos",
    "draft_length", "chat_template_kwargs", "structured_outputs",
}  # fmt: skip
"""Honoured, or ignored, as in a chat."""
DEFAULT_ONLY: dict[str, tuple[object, ...]] = {
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Fields that are not supported, with the values that have no effect."""
NAMES = {
    "max_tokens": "max_output_tokens", "messages": "input", "prompt": "input", "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}  # fmt: skip
"""Of a chat's fields, in a response."""
CHAT_FIELD = re.compile(rf"({'|'.join(NAMES)})(\[[^:]*)?: ")
NESTED_FIELDS = {"reasoning": {"effort", "summary", "generate_summary"}, "text": {"format", "verbosity"}}
"""Reasoning comes whole, so that summaries of it have no effect."""
OTHER_FIELDS = {"input", "instructions", "max_output_tokens", "reasoning", "text", "tools", "tool_choice"}
TEXT_PARTS = ("input_text", "output_text", "text")


class ResponseBuilder:
    """One request and its response: a chat's deltas in, events out; the last one has the whole response."""

    def __init__(self, body: Json) -> None:
        """Raises RequestError, which names an invalid or unsupported field."""
        fields = {name: value for name, value in body.items() if value is not None}
        self.chat = _chat(fields)
        """The body of the chat that it is."""
        self._response: Json = {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
            "status": "in_progress", "error": None, "incomplete_details": None, "model": fields.get("model"),
            "output": [], "instructions": fields.get("instructions"), "metadata": fields.get("metadata", {}),
            "max_output_tokens": fields.get("max_output_tokens"), "store": False, "previous_response_id": None,
            "parallel_tool_calls": fields.get("parallel_tool_calls", True), "tools": fields.get("tools", []),
            "tool_choice": fields.get("tool_choice", "auto"), "temperature": fields.get("temperature", 1.0),
            "top_p": fields.get("top_p", 1.0), "text": fields.get("text", {"format": {"type": "text"}}),
            "reasoning": fields.get("reasoning"), "truncation": "disabled", "usage": None,
        }  # fmt: skip
        self._item: Json | None = None
        self._num_events = 0

    def whole(self, document: Json) -> Json:
        """The response to a chat that is not streamed."""
        (choice,) = document["choices"]
        for _ in self._add(choice["message"]):
            pass
        *_, last = self._finish(document, choice["finish_reason"])
        response: Json = last["response"]
        return response

    async def events(self, documents: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        """Of a streamed chat, whose last document has the usage."""
        finish_reason = "stop"
        async with aclosing(documents):
            async for document in documents:
                if self._num_events == 0:  # not before it, so that an error has its status
                    for kind in ("response.created", "response.in_progress"):
                        yield self._event(kind, response=dict(self._response, output=[]))
                for choice in document["choices"]:
                    for event in self._add(choice["delta"]):
                        yield event
                    finish_reason = choice["finish_reason"] or finish_reason
                if document.get("usage"):
                    for event in self._finish(document, finish_reason):
                        yield event

    def _add(self, delta: Json) -> Iterator[Json]:
        calls = delta.get("tool_calls") or []
        if calls and "id" not in calls[0]:  # ends the call before; text comes behind it
            yield from self._add_arguments(calls.pop(0)["function"]["arguments"])
        for kind, text in (("reasoning", delta.get("reasoning")), ("message", delta.get("content"))):
            if text:
                yield from self._open(kind)
                self._part()["text"] += text
                yield self._part_event("delta", kind, delta=text)
        for call in calls:
            yield from self._close()
            yield from self._open("function_call", call_id=call["id"], name=call["function"]["name"], arguments="")
            yield from self._add_arguments(call["function"]["arguments"])

    def _add_arguments(self, text: str) -> Iterator[Json]:
        assert self._item is not None
        if text:
            self._item["arguments"] += text
            yield self._event("response.function_call_arguments.delta", delta=text, **self._place())

    def _finish(self, document: Json, finish_reason: str) -> Iterator[Json]:
        usage, is_cut = document["usage"], finish_reason == "length"
        yield from self._close("incomplete" if is_cut else "completed")
        details = usage.get("completion_tokens_details", {})
        self._response |= {
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": document["model"],
            "metrics": document["metrics"],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
                "total_tokens": usage["total_tokens"],
            },
        }
        yield self._event(f"response.{self._response['status']}", response=self._response)

    def _open(self, kind: str, **fields: object) -> Iterator[Json]:
        """Begins an item, unless the present one goes on."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._close()
        item: Json = {"id": f"{kind[:4]}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._item = item
        self._response["output"].append(item)
        yield self._event("response.output_item.added", output_index=self._index(), item=dict(item))
        if kind != "function_call":
            part: Json = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"] = [part]
            yield self._event("response.content_part.added", part=dict(part), **self._place())

    def _close(self, status: str = "completed") -> Iterator[Json]:
        if (item := self._item) is None:
            return
        item["status"] = status
        if item["type"] == "function_call":
            fields = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **fields, **self._place())
        else:
            part = self._part()
            yield self._part_event("done", item["type"], text=part["text"])
            yield self._event("response.content_part.done", part=dict(part), **self._place())
        yield self._event("response.output_item.done", output_index=self._index(), item=dict(item))
        self._item = None

    def _part(self) -> Json:
        assert self._item is not None
        part: Json = self._item["content"][0]
        return part

    def _index(self) -> int:
        return len(self._response["output"]) - 1

    def _place(self) -> Json:
        assert self._item is not None
        place = {"item_id": self._item["id"], "output_index": self._index()}
        return place if self._item["type"] == "function_call" else {**place, "content_index": 0}

    def _part_event(self, what: str, kind: str, **fields: object) -> Json:
        if kind == "message":
            return self._event(f"response.output_text.{what}", logprobs=[], **fields, **self._place())
        return self._event(f"response.reasoning_text.{what}", **fields, **self._place())

    def _event(self, kind: str, **fields: object) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _chat(fields: Json) -> Json:
    for name, value in fields.items():
        if name in SAME_FIELDS or name in OTHER_FIELDS:
            continue
        if name not in DEFAULT_ONLY:
            raise RequestError(f"{name}: unknown field of a response")
        if value not in DEFAULT_ONLY[name]:
            words = " or ".join(map(repr, DEFAULT_ONLY[name]))
            raise RequestError(f"{name}: expected {words}, because no other value is supported, found {shown(value)}")
    chat = {name: value for name, value in fields.items() if name in SAME_FIELDS}
    chat["messages"] = list(_messages(fields))
    if "max_output_tokens" in fields:
        chat["max_tokens"] = fields["max_output_tokens"]
    if (effort := _object(fields, "reasoning").get("effort")) is not None:
        chat["reasoning_effort"] = effort
    text = _object(fields, "text")
    if (verbosity := text.get("verbosity")) not in (None, "medium"):
        words = "medium, because no other value is supported"
        raise RequestError(f"text.verbosity: expected {words}, found {shown(verbosity)}")
    if (form := text.get("format")) is not None:
        is_schema = isinstance(form, dict) and form.get("type") == "json_schema"
        chat["response_format"] = {"type": "json_schema", "json_schema": form} if is_schema else form
    if "tools" in fields:
        chat["tools"] = _tools(fields["tools"])
    if "tool_choice" in fields:
        chat["tool_choice"] = _nested(fields["tool_choice"])
    if fields.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _object(fields: Json, name: str) -> Json:
    value = fields.get(name, {})
    if not isinstance(value, dict):
        raise RequestError(f"{name}: expected an object, found {shown(value)}")
    if unknown := sorted(value.keys() - NESTED_FIELDS[name]):
        raise RequestError(f"{name}.{unknown[0]}: unknown field of a response")
    return value


def _tools(values: object) -> list[object]:
    if not isinstance(values, list):
        raise RequestError(f"tools: expected a list, found {shown(values)}")
    tools = [_nested(value) for value in values]
    if wrong := next((value for value, tool in zip(values, tools, strict=True) if value is tool), None):
        raise RequestError(f'tools: expected {{"type": "function", "name": text, ...}}, found {shown(wrong)}')
    return tools


def _nested(value: object) -> object:
    """A function as a chat has it, whose fields are an object of their own; the same where it is none."""
    if not isinstance(value, dict) or value.get("type") != "function":
        return value
    return {"type": "function", "function": {key: item for key, item in value.items() if key != "type"}}


@contextmanager
def names_of_a_response() -> Iterator[None]:
    """Errors about what the chat was made of name the response's own field."""
    try:
        yield
    except (RequestError, HttpError) as error:
        if found := CHAT_FIELD.match(error.message):
            error.message = f"{NAMES[found[1]]}: {error.message[found.end() :]}"
        raise


def _messages(fields: Json) -> Iterator[Json]:
    """Calls that follow each other are one message; reasoning is left out, as it is in a chat."""
    if "instructions" in fields:
        if not isinstance(fields["instructions"], str):
            raise RequestError(f"instructions: expected a text, found {shown(fields['instructions'])}")
        yield {"role": "system", "content": fields["instructions"]}
    items = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise RequestError(f"input: expected a text or a list of items, found {shown(items)}")
    calls: list[Json] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not all(isinstance(text, str) for text in function.values()):
                raise RequestError(f"input: expected calls with a name and arguments, found {shown(item)}")
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
            continue
        if calls:
            yield {"role": "assistant", "content": "", "tool_calls": calls}
            calls = []
        if kind == "message":
            role = item.get("role")
            yield {"role": "system" if role == "developer" else role, "content": _text(item.get("content"))}
        elif kind == "function_call_output":
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))}
        elif kind != "reasoning":
            expected = "message, function_call, function_call_output or reasoning"
            raise RequestError(f"input: expected items of type {expected}, found {shown(item)}")
    if calls:
        yield {"role": "assistant", "content": "", "tool_calls": calls}


def _text(content: object) -> object:
    if not isinstance(content, list):
        return content
    is_text = [
        isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)
        for part in content
    ]
    if not all(is_text):
        raise RequestError(f"input: expected parts of type {', '.join(TEXT_PARTS)}, found {shown(content)}")
    return "".join(part["text"] for part in content)
