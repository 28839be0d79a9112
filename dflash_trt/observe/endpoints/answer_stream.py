# SPDX-License-Identifier: Apache-2.0
"""An answer of a server, and the events of its stream that it is read from."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from dflash_trt.errors import EndpointError, cut, shown
from dflash_trt.files.json_file import json_object
from dflash_trt.observe.endpoints.observed_acceptance import ObservedAcceptance, of_request

T = TypeVar("T")
MAX_LINE_BYTES = 8 * 2**20
MAX_STREAM_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One choice, streamed."""

    text: str
    reasoning: str
    """Thinking text of a chat: `reasoning_content` or `reasoning`."""
    finish: str | None
    """The server's `finish_reason`: stop, length, ..."""
    input_tokens: int | None
    """From the server's `usage`, like the two below."""
    output_tokens: int | None
    cached_tokens: int | None
    """Prompt tokens served from the prefix cache; None if the server does not report them."""
    emitted: tuple[float, ...]
    """Seconds from the request to each event that carried text."""
    seconds: float
    """From the request to the end of the stream."""
    acceptance: ObservedAcceptance | None
    """Acceptance of this request, if the server reports it."""


class AnswerReader:
    def __init__(self, where: str, *, is_chat: bool) -> None:
        self._where = where
        self._is_chat = is_chat
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._emitted: list[float] = []
        self._finish: str | None = None
        self._usage: dict[str, object] = {}
        self._metrics: dict[str, object] = {}

    def add(self, event: dict[str, object], seconds: float) -> None:
        """An event that came `seconds` after the request; raises EndpointError for an event outside OpenAI's API."""
        self._usage = self._optional(event, "usage", dict) or self._usage
        self._metrics = self._optional(event, "metrics", dict) or self._metrics
        choices = self._optional(event, "choices", list) or []
        if not choices:
            return
        choice = choices[0]
        if not isinstance(choice, dict):
            raise EndpointError(f"{self._where}: expected choices as objects, found {shown(choice)}")
        part = (self._optional(choice, "delta", dict) or {}) if self._is_chat else choice
        text = self._optional(part, "content" if self._is_chat else "text", str) or ""
        thought = self._optional(part, "reasoning_content", str) or self._optional(part, "reasoning", str) or ""
        self._text.append(text)
        self._reasoning.append(thought)
        if text or thought:
            self._emitted.append(seconds)
        self._finish = self._optional(choice, "finish_reason", str) or self._finish

    def end(self, seconds: float) -> Answer:
        """The answer; raises EndpointError if it has no finish reason."""
        if self._finish is None:
            raise EndpointError(f"{self._where}: the answer has no finish_reason")
        details = self._optional(self._usage, "prompt_tokens_details", dict) or {}
        speculative = self._optional(self._metrics, "speculative_decoding", dict)
        return Answer(
            text="".join(self._text), reasoning="".join(self._reasoning), finish=self._finish,
            input_tokens=self._optional(self._usage, "prompt_tokens", int),
            output_tokens=self._optional(self._usage, "completion_tokens", int),
            cached_tokens=self._optional(details, "cached_tokens", int), emitted=tuple(self._emitted),
            seconds=seconds, acceptance=None if speculative is None else of_request(speculative, self._where),
        )  # fmt: skip

    def _optional(self, holder: dict[str, object], name: str, kind: type[T]) -> T | None:
        value = holder.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise EndpointError(f"{self._where}: expected {name} as {kind.__name__}, found {shown(value)}")
        return value


def events(pieces: Iterable[bytes], where: str, deadline: float) -> Iterator[dict[str, object]]:
    """The objects of a stream, up to its [DONE].

    `deadline` is a time of time.perf_counter(). Raises EndpointError for a stream that ends without [DONE], reports a
    failure, is too long, or has not ended by then.
    """
    for line in _lines(pieces, where, deadline):
        if not line.startswith(b"data:"):
            continue  # comments that keep a connection open, names of events
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json_object(data, where, EndpointError, what="an event of a stream", finite=False)
        if event.get("error"):
            raise EndpointError(f"{where}: expected an answer, found in its stream: {cut(str(event['error']))}")
        yield event
    raise EndpointError(f"{where}: the stream broke off before [DONE]")


def _lines(pieces: Iterable[bytes], where: str, deadline: float) -> Iterator[bytes]:
    rest, total = b"", 0
    for piece in pieces:
        total += len(piece)
        if time.perf_counter() > deadline:
            raise EndpointError(f"{where}: the answer did not end in time")
        if total > MAX_STREAM_BYTES or len(rest) > MAX_LINE_BYTES:
            raise EndpointError(f"{where}: expected an answer of bounded size, found more than {total} bytes")
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.rstrip(b"\r") for line in lines)
    yield rest
