# SPDX-License-Identifier: Apache-2.0
"""Requests of the Responses API, as far as a stateless chat without tools: each becomes a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from dflash_trt.api.neutral_fields import ANY, NEUTRAL_VALUES
from dflash_trt.api.sampling_params import OPENAI_TEMPERATURE
from dflash_trt.errors import RequestError, shown
from dflash_trt.runtime.server.request.decoding import decode_fields

NEUTRAL = NEUTRAL_VALUES | {
    "tools": ([],), "tool_choice": ("auto", "none"), "parallel_tool_calls": ANY, "max_tool_calls": ANY,
    "truncation": ("disabled",), "background": (False,), "include": ([],), "top_logprobs": (0,),
    "stream_options": ({},), "previous_response_id": (), "conversation": (), "prompt": (),
}  # fmt: skip
"""Values of unsupported fields that change nothing; no state is kept between requests."""
TEXT_PARTS = ("input_text", "output_text", "text")
INPUT_ITEM = {"type": "object", "properties": {"role": {"type": "string"}, "content": {"type": "string"}}}


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None
    """No effect, as in a chat."""


class ReasoningConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the reasoning."""

    effort: str | None = None
    summary: str | None = None
    """No effect: the reasoning itself is returned."""


class ResponsesBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema=INPUT_ITEM)]], Meta(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: float = OPENAI_TEMPERATURE
    top_p: float = 1.0
    stream: bool = False
    text: TextConfig = TextConfig()
    reasoning: ReasoningConfig = ReasoningConfig()


def chat_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the chat that answers a request; RequestError, with the field's name, for an unsupported one."""
    body = decode_fields(fields, ResponsesBody, NEUTRAL)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    chat = {
        "model": body.model,
        "messages": system + _messages(items),
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "stream": body.stream,
        "stream_options": {"include_usage": True} if body.stream else None,
        "response_format": None if body.text.format is None else _response_format(body.text.format),
        "verbosity": body.text.verbosity,
        "reasoning_effort": body.reasoning.effort,
    }
    return {name: value for name, value in chat.items() if value is not None}


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's response_format, in which a schema and its name lie one level deeper."""
    if given.get("type") != "json_schema":
        return dict(given)
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a chat; reasoning of an earlier answer goes to the message after it."""
    messages, reasoning = [], ""
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _text(item.get("content") or [], f"input[{index}].content")
        elif kind == "message":
            text = _text(item.get("content"), f"input[{index}].content")
            message = {"role": item.get("role"), "content": text}
            messages.append(message | ({"reasoning_content": reasoning} if reasoning else {}))
            reasoning = ""
        else:
            raise RequestError(
                f"input[{index}].type: {shown(kind)} is not supported, only messages and their reasoning"
            )
    return messages


def _text(content: object, field: str) -> str:
    """The text of an item's content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{field}: it is neither a text nor a list of parts: {shown(content)}")
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in (*TEXT_PARTS, "reasoning_text")
        if not is_text or not isinstance(part.get("text"), str):
            raise RequestError(f"{field}: only {' and '.join(TEXT_PARTS)} are supported, not {shown(part)}")
    return "".join(part["text"] for part in content)
