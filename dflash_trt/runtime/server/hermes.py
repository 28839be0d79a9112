# SPDX-License-Identifier: Apache-2.0
"""Calls in Hermes's format, which Qwen2.5 and Qwen3 share: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

transformers 5.24's ResponseParser reports the name of a call only after its arguments, and raises for text that is no
JSON; here the name comes first, and such text is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from dflash_trt.runtime.text import overlap

BEGIN, END = "<tool_call>", "</tool_call>"
NAME = r"[a-zA-Z0-9_-]{1,64}"
"""Names of functions, as in the OpenAI API."""
HEADER = re.compile(rf'\s*\{{\s*"name"\s*:\s*"({NAME})"\s*,\s*"arguments"\s*:\s*(?=\{{)')
MARK = re.compile(r'["\\{}\[\]<\x00-\x1f]')


class CallDelta(msgspec.Struct, frozen=True):
    """What a chunk of an answer adds to a call."""

    name: str | None
    """Name of the call that it begins; None where it continues the last one."""
    arguments: str
    """Text of a JSON object, as the target writes it."""


class HermesParser:
    """Incremental parser of one answer: text in, content and calls out; text that is no call is content.

    Arguments are streamed where a call begins with its name and an object, as templates and grammars write it; any
    other call is reported when it has ended.
    """

    def __init__(self) -> None:
        self.has_open_call = False
        """Whether the text so far ends inside arguments."""
        self._text = self._content = ""
        self._is_last = self._has_calls = False
        self._calls: list[CallDelta] = []
        self._reading = self._read()

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        """Returns what `text` adds to (content, calls); drops whitespace around calls."""
        self._text += text
        self._is_last = is_last
        self._content, self._calls = "", []
        next(self._reading)
        return self._content, self._calls

    def _read(self) -> Iterator[None]:
        """Reads what is there, and yields for more."""
        while True:
            before, begin, rest = self._text.partition(BEGIN)
            if not begin:
                ready = self._text if self._is_last else self._text[: len(self._text) - overlap(self._text, BEGIN)]
                self._content += self._take(len(ready if self._is_last and not self._has_calls else ready.rstrip()))
                yield
                continue
            self._content += self._take(len(before.rstrip()))
            body, end, after = rest.partition(END)
            if header := HEADER.match(rest):
                yield from self._begin_call(CallDelta(header[1], ""), rest[header.end() :], JsonObject())
            elif not end and not self._is_last:
                yield
            elif call := _whole_call(body):
                yield from self._begin_call(call, after)
            else:
                self._content += self._take(len(self._text) - len(after))

    def _begin_call(self, call: CallDelta, rest: str, arguments: JsonObject | None = None) -> Iterator[None]:
        """Reads a call, and `arguments` that follow; drops text between them and the end, unless that is missing."""
        self._calls.append(call)
        self._has_calls, self._text = True, rest
        if arguments is not None:
            self.has_open_call = True
            while not arguments.has_ended:
                if text := self._take(arguments.take(self._text, is_last=self._is_last)):
                    self._calls.append(CallDelta(None, text))
                if not arguments.has_ended:
                    yield
            self.has_open_call = False
            while END not in self._text and not self._is_last:
                yield
            _, end, after = self._text.partition(END)
            rest = self._text.lstrip().removeprefix("}")
            self._text = after if end else "" if END.startswith(rest.lstrip()) else rest
        while not (stripped := self._text.lstrip()):
            yield
        self._text = stripped

    def _take(self, size: int) -> str:
        text, self._text = self._text[:size], self._text[size:]
        return text


class JsonObject:
    """Finds the end of a JSON object in a stream: the last bracket, or the end of the call if that is earlier."""

    def __init__(self) -> None:
        self.has_ended = False
        self._depth = 0
        self._is_in_string = False

    def take(self, text: str, *, is_last: bool) -> int:
        """Number of characters of `text` that belong to the object; `text` begins with what was not taken before."""
        end = 0
        while mark := MARK.search(text, end):
            begin, end = mark.span()
            if self._is_in_string:
                if mark[0] == "\\":
                    if end == len(text) and not is_last:
                        return begin
                    end += 1
                elif mark[0] == '"' or mark[0] < " ":  # a string of JSON has no line breaks
                    self._is_in_string = False
            elif mark[0] == '"':
                self._is_in_string = True
            elif mark[0] == "<":
                tag = text[begin : begin + len(END)]
                self.has_ended = tag == END
                if self.has_ended or (END.startswith(tag) and not is_last):
                    return begin
            else:
                self._depth += (mark[0] in "{[") - (mark[0] in "}]")
                if self._depth == 0 and mark[0] in "}]":
                    self.has_ended = True
                    return end
        return len(text)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def _whole_call(text: str) -> CallDelta | None:
    try:
        call = msgspec.json.decode(text, type=_Call)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = bytes(call.arguments).decode()
    return CallDelta(call.name, arguments) if arguments.startswith("{") else None
