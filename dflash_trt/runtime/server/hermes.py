# SPDX-License-Identifier: Apache-2.0
"""Calls in Hermes's format, which Qwen2.5 and Qwen3 share: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

transformers 5.24's ResponseParser reports the name of a call only after its arguments, and raises for text that is no
JSON; here the name comes first, and such text is content.
"""

from __future__ import annotations

import re

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
        self._text = ""
        self._is_last = False
        self._content = ""
        self._calls: list[CallDelta] = []
        self._has_calls = self._is_behind_call = False
        self._arguments = JsonObject()
        self._read = self._read_text

    @property
    def has_open_call(self) -> bool:
        """Whether the text so far ends inside arguments."""
        return self._read == self._read_arguments

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        """Returns what `text` adds to (content, calls); drops whitespace around calls."""
        self._text += text
        self._is_last = is_last
        self._content, self._calls = "", []
        while self._read():
            pass
        return self._content, self._calls

    def _read_text(self) -> bool:
        """Reads what it can; returns whether there is more to read now, as the other readers do."""
        if self._is_behind_call:
            self._text = self._text.lstrip()
            self._is_behind_call = not self._text
        before, begin, rest = self._text.partition(BEGIN)
        if not begin:
            ready = self._text if self._is_last else self._text[: len(self._text) - overlap(self._text, BEGIN)]
            self._content += self._take(len(ready if self._is_last and not self._has_calls else ready.rstrip()))
            return False
        self._content += self._take(len(before.rstrip()))
        if header := HEADER.match(rest):
            self._begin_call(CallDelta(header[1], ""), rest[header.end() :])
            self._arguments, self._read = JsonObject(), self._read_arguments
            return True
        body, end, after = rest.partition(END)
        if not end and not self._is_last:
            return False
        if call := _whole_call(body):
            self._begin_call(call, after)
        else:
            self._content += self._take(len(self._text) - len(after))
        return True

    def _read_arguments(self) -> bool:
        if text := self._take(self._arguments.take(self._text, is_last=self._is_last)):
            self._calls.append(CallDelta(None, text))
        if self._arguments.has_ended:
            self._read = self._read_end
        return self._arguments.has_ended

    def _read_end(self) -> bool:
        """Drops text between the arguments and the end of the call; without an end, it is content."""
        _, end, after = self._text.partition(END)
        if not end and not self._is_last:
            return False
        rest = self._text.lstrip().removeprefix("}")
        self._text = after if end else "" if END.startswith(rest.lstrip()) else rest
        self._read = self._read_text
        return True

    def _begin_call(self, call: CallDelta, rest: str) -> None:
        self._calls.append(call)
        self._has_calls = self._is_behind_call = True
        self._text = rest

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
