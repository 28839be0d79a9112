# SPDX-License-Identifier: Apache-2.0
"""Splits text into content and tool calls in Hermes's format, which Qwen2.5 and Qwen3 share.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>

transformers 5.24's ResponseParser raises for text that is no JSON; here such text is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import msgspec

from dflash_trt.runtime.text import overlap

BEGIN, END = "<tool_call>", "</tool_call>"


class CallTags(NamedTuple):
    """Texts around a call."""

    begin: str
    end: str
    section: tuple[str, ...] = ()
    """Texts around all calls, which are no content."""


HERMES = CallTags(BEGIN, END)
JSON = json.JSONDecoder(parse_int=str, parse_float=str)
"""Finds where JSON ends; its numbers are not read."""


CUT: Literal["cut"] = "cut"
"""Read from a call that ends inside a JSON text."""


class CallDelta(msgspec.Struct, frozen=True):
    """A call, or the part of one, that a chunk of an answer adds."""

    name: str | None
    """Name of the call that it begins; None where it continues the last one."""
    arguments: str
    """Text of a JSON object, as the target writes it."""


ReadCall = Callable[[str], CallDelta | Literal["cut"] | None]
"""Reads the text between the tags of a call; None for text that is no call."""


class HermesParser:
    """Incremental parser of one answer: text in, content and whole calls out; text that is no call is content.

    A call's end does not count inside the JSON texts of its arguments.
    """

    def __init__(self, read_call: ReadCall | None = None, tags: CallTags = HERMES) -> None:
        """`read_call` reads the text between the tags; by default, as JSON."""
        self._read_call = read_call or json_call
        self._num_inside = 0
        """Characters of a call, up to which it can only end inside a JSON text."""
        self._tags = tags
        self._first_edge, self._last_edge = _edge(tags.section), _edge(tag[::-1] for tag in tags.section)
        self.has_open_call = False
        """Whether the answer ended inside a call; its text is content."""
        self._text = ""
        self._has_calls = self._follows_call = False

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        """Returns what `text` adds to (content, calls); drops whitespace around calls."""
        self._text += text
        begin_tag, end_tag, section = self._tags
        content, calls = "", list[CallDelta]()
        while begin_tag in self._text:
            before, _, rest = self._text.partition(begin_tag)
            call, stop = self._read(rest, is_last=is_last)
            if call is CUT and not is_last:
                break
            self._num_inside = 0
            self.has_open_call = call is CUT
            if isinstance(call, CallDelta):
                calls.append(call)
                content += self._take(len(self._without_end(before)))
                self._text, self._has_calls, self._follows_call = rest[stop + len(end_tag) :], True, True
            else:  # it is content, and what follows its first end may be a call
                content += self._take(len(self._text) - len(rest.partition(end_tag)[2]))
        before, begin, _ = self._text.partition(begin_tag)
        held = 0 if begin or is_last else max(overlap(before, tag) for tag in (begin_tag, *section))
        ready = before[: len(before) - held]
        return content + self._take(len(ready if is_last and not self._has_calls else self._without_end(ready))), calls

    def _read(self, text: str, *, is_last: bool) -> tuple[CallDelta | Literal["cut"] | None, int]:
        """The call that a text begins with, which may end without its tag if it is the last text, and where it ends."""
        while (stop := text.find(self._tags.end, self._num_inside)) >= 0:
            if (call := self._read_call(text[:stop])) is not CUT:
                return call, stop
            self._num_inside = stop + len(self._tags.end)
        call = self._read_call(text) if is_last else CUT
        return call or CUT, len(text)

    def _take(self, size: int) -> str:
        text, self._text = self._text[:size], self._text[size:]
        if self._follows_call:
            text = self._first_edge.sub("", text, count=1)
            self._follows_call = not text
        return text

    def _without_end(self, text: str) -> str:
        """A text without the whitespace and the section's tags that it ends with."""
        text = text.rstrip()
        edge = self._last_edge.match(text[::-1]) if text.endswith(self._tags.section) else None
        return text[: len(text) - (edge.end() if edge else 0)]


def _edge(tags: Iterable[str]) -> re.Pattern[str]:
    """Whitespace and tags that a text begins with."""
    either = "|".join([r"\s+", *map(re.escape, tags)])
    return re.compile(f"(?:{either})*")


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def json_call(text: str) -> CallDelta | Literal["cut"] | None:
    """The call in a text; None for one that is no call."""
    try:
        call = msgspec.json.decode(text, type=_Call)
    except (msgspec.DecodeError, RecursionError):
        return CUT if is_cut(text) else None
    arguments = bytes(call.arguments).decode()
    return CallDelta(call.name, arguments) if arguments.startswith("{") else None


def is_cut(text: str) -> bool:
    """Whether JSON ends inside a text."""
    try:
        JSON.decode(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        pass
    return False
