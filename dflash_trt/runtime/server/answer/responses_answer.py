# SPDX-License-Identifier: Apache-2.0
"""Answers of the Responses API, made from those of a chat: whole, or as events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class ResponseBuilder:
    """Chat answers in, one response or its events out."""

    def __init__(self, first: Document) -> None:
        name = first.id.partition("-")[2]
        self.response = ResponseObject(id=f"resp_{name}", created_at=first.created, model=first.model)
        self._name = name
        self._num_events = 0

    def begin(self) -> Iterator[ResponseEvent]:
        """The first events."""
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def add(self, document: ChatCompletion) -> Iterator[ResponseEvent]:
        """Adds a chat's whole answer, or an event of it."""
        for choice in document.choices:
            message = choice.delta or choice.message
            assert message, "a choice has one of them"
            if message.reasoning:
                yield from self._add_text("reasoning", message.reasoning)
            if message.content:
                yield from self._add_text("message", message.content)
            if choice.finish_reason is not None:
                is_whole = choice.finish_reason == "stop"
                self.response.status = "completed" if is_whole else "incomplete"
                self.response.incomplete_details = None if is_whole else {"reason": "max_output_tokens"}
        if isinstance(document.usage, Usage):
            self.response.usage = _usage(document.usage)

    def end(self) -> Iterator[ResponseEvent]:
        """The last events."""
        yield from self._close_item()
        yield self._event(f"response.{self.response.status}", response=self.response)

    def _add_text(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[ResponseEvent]:
        output = self.response.output
        if not output or output[-1].type != kind:
            yield from self._close_item()
            yield from self._open_item(kind)
        (part,) = output[-1].content
        part.text += text
        yield self._part_event(f"response.{part.type}.delta", delta=text)

    def _open_item(self, kind: Literal["message", "reasoning"]) -> Iterator[ResponseEvent]:
        is_message = kind == "message"
        item = OutputItem(
            id=f"{'msg' if is_message else 'rs'}_{self._name}_{len(self.response.output)}", type=kind, content=[]
        )
        if is_message:
            item.role = "assistant"
        else:
            item.summary = []
        self.response.output.append(item)
        yield self._event("response.output_item.added", output_index=len(self.response.output) - 1, item=item)
        item.content = [OutputText(type=PART_TYPES[kind], annotations=[] if is_message else UNSET)]
        yield self._part_event("response.content_part.added", part=item.content[0])

    def _close_item(self) -> Iterator[ResponseEvent]:
        if not self.response.output:
            return
        item = self.response.output[-1]
        item.status = "incomplete" if self.response.status == "incomplete" else "completed"
        (part,) = item.content
        yield self._part_event(f"response.{part.type}.done", text=part.text)
        yield self._part_event("response.content_part.done", part=part)
        yield self._event("response.output_item.done", output_index=len(self.response.output) - 1, item=item)

    def _part_event(self, kind: str, **fields: Any) -> ResponseEvent:
        index, item = len(self.response.output) - 1, self.response.output[-1]
        if "output_text" in kind:
            fields["logprobs"] = []
        return self._event(kind, output_index=index, item_id=item.id, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._num_events += 1
        return ResponseEvent(type=kind, sequence_number=self._num_events - 1, **fields)


def whole_response(document: Document) -> ResponseObject:
    """The response with a chat's whole answer."""
    assert isinstance(document, ChatCompletion)
    builder = ResponseBuilder(document)
    for _ in (*builder.add(document), *builder.end()):
        pass
    return builder.response


class ResponseEvents:
    """Passes the events of a response to a sink, made from those of a chat with usage at its end."""

    def __init__(self, put: Callable[[ResponseEvent], None], end: Callable[[Exception | None], None]) -> None:
        self._put, self._end = put, end
        self._builder: ResponseBuilder | None = None

    def put(self, document: Document) -> None:
        """Passes what an event of the chat adds."""
        assert isinstance(document, ChatCompletion)
        if self._builder is None:
            self._builder = ResponseBuilder(document)
            self._put_all(self._builder.begin())
        self._put_all(self._builder.add(document))

    def end(self, error: Exception | None = None) -> None:
        """Passes the last events, or the error."""
        if error is None:
            assert self._builder is not None, "a chat has at least one event"
            self._put_all(self._builder.end())
        self._end(error)

    def _put_all(self, events: Iterator[ResponseEvent]) -> None:
        for event in events:
            self._put(event)


def _usage(usage: Usage) -> ResponseUsage:
    prompt, completion = usage.prompt_tokens_details or {}, usage.completion_tokens_details or {}
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details={"cached_tokens": prompt.get("cached_tokens", 0)},
        output_tokens=usage.completion_tokens,
        output_tokens_details={"reasoning_tokens": completion.get("reasoning_tokens", 0)},
        total_tokens=usage.total_tokens,
    )
