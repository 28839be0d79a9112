# SPDX-License-Identifier: Apache-2.0
"""Answers of the Responses API, made from those of a chat: whole, or as events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from dflash_trt.runtime.server.answer.bodies import ChatCompletion, Document, Usage

PART_TYPES: dict[Literal["message", "reasoning"], Literal["output_text", "reasoning_text"]] = {
    "message": "output_text",
    "reasoning": "reasoning_text",
}
"""Type of an item's text, by the item's."""


class OutputText(Struct, kw_only=True):
    """A text of an item."""

    type: Literal["output_text", "reasoning_text"]
    text: str = ""
    annotations: list[str] | UnsetType = UNSET


class OutputItem(Struct, kw_only=True):
    """The message of an answer, or the reasoning before it."""

    id: str
    type: Literal["message", "reasoning"]
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[str] | UnsetType = UNSET
    content: list[OutputText]
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"


class ResponseUsage(Struct, kw_only=True):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[Literal["cached_tokens"], int]
    output_tokens: int
    output_tokens_details: dict[Literal["reasoning_tokens"], int]
    total_tokens: int


class ResponseObject(Struct, kw_only=True):
    """The answer to POST /v1/responses."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"] = "in_progress"
    output: list[OutputItem] = field(default_factory=list)
    usage: ResponseUsage | None = None
    error: None = None
    incomplete_details: dict[Literal["reason"], Literal["max_output_tokens"]] | None = None
    parallel_tool_calls: bool = True
    tool_choice: Literal["auto"] = "auto"
    tools: list[str] = field(default_factory=list)


class ResponseEvent(Struct, kw_only=True):
    """An event of a streamed answer; which fields it has depends on its type."""

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[float] | UnsetType = UNSET


class ResponseStream:
    """A response and its events, made from the documents of a chat; the last of them has usage."""

    response: ResponseObject

    def __init__(self, put: Callable[[ResponseEvent], None], end: Callable[[Exception | None], None]) -> None:
        """`put` gets each event, `end` then None or an error."""
        self._put, self._end = put, end
        self._name = ""
        self._num_events = 0

    def put(self, document: Document) -> None:
        """Adds a chat's whole answer, or an event of it."""
        assert isinstance(document, ChatCompletion)
        if not self._name:
            self._name = document.id.partition("-")[2]
            self.response = ResponseObject(id=f"resp_{self._name}", created_at=document.created, model=document.model)
            self._event("response.created", response=self.response)
            self._event("response.in_progress", response=self.response)
        for choice in document.choices:
            message = choice.delta or choice.message
            assert message, "a choice has one of them"
            if message.reasoning:
                self._add_text("reasoning", message.reasoning)
            if message.content:
                self._add_text("message", message.content)
            if choice.finish_reason is not None:
                is_whole = choice.finish_reason == "stop"
                self.response.status = "completed" if is_whole else "incomplete"
                self.response.incomplete_details = None if is_whole else {"reason": "max_output_tokens"}
        if isinstance(document.usage, Usage):
            self.response.usage = _usage(document.usage)

    def end(self, error: Exception | None) -> None:
        """Ends the response, after its last events or with an error."""
        if error is None:
            self._close_item()
            self._event(f"response.{self.response.status}", response=self.response)
        self._end(error)

    def _add_text(self, kind: Literal["message", "reasoning"], text: str) -> None:
        output = self.response.output
        if not output or output[-1].type != kind:
            self._close_item()
            self._open_item(kind)
        (part,) = output[-1].content
        part.text += text
        self._part_event(f"response.{part.type}.delta", delta=text)

    def _open_item(self, kind: Literal["message", "reasoning"]) -> None:
        is_message = kind == "message"
        item = OutputItem(
            id=f"{'msg' if is_message else 'rs'}_{self._name}_{len(self.response.output)}", type=kind, content=[]
        )
        if is_message:
            item.role = "assistant"
        else:
            item.summary = []
        self.response.output.append(item)
        self._event("response.output_item.added", output_index=len(self.response.output) - 1, item=item)
        item.content = [OutputText(type=PART_TYPES[kind], annotations=[] if is_message else UNSET)]
        self._part_event("response.content_part.added", part=item.content[0])

    def _close_item(self) -> None:
        if not self.response.output:
            return
        item = self.response.output[-1]
        item.status = "incomplete" if self.response.status == "incomplete" else "completed"
        (part,) = item.content
        self._part_event(f"response.{part.type}.done", text=part.text)
        self._part_event("response.content_part.done", part=part)
        self._event("response.output_item.done", output_index=len(self.response.output) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> None:
        index, item = len(self.response.output) - 1, self.response.output[-1]
        if "output_text" in kind:
            fields["logprobs"] = []
        self._event(kind, output_index=index, item_id=item.id, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        self._put(ResponseEvent(type=kind, sequence_number=self._num_events, **fields))
        self._num_events += 1


def whole_response(document: Document) -> ResponseObject:
    """The response with a chat's whole answer."""
    stream = ResponseStream(lambda event: None, lambda error: None)
    stream.put(document)
    stream.end(None)
    return stream.response


def _usage(usage: Usage) -> ResponseUsage:
    prompt, completion = usage.prompt_tokens_details or {}, usage.completion_tokens_details or {}
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details={"cached_tokens": prompt.get("cached_tokens", 0)},
        output_tokens=usage.completion_tokens,
        output_tokens_details={"reasoning_tokens": completion.get("reasoning_tokens", 0)},
        total_tokens=usage.total_tokens,
    )
