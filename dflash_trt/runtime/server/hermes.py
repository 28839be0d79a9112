# SPDX-License-Identifier: Apache-2.0
"""Splits text into content and tool calls in Hermes's format, which Qwen2.5 and Qwen3 share.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>

transformers 5.24's ResponseParser raises for text that is no JSON; here such text is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

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


class CallDelta(msgspec.Struct, frozen=True):
    """A call, or the part of one, that a chunk of an answer adds."""

    name: str | None
    """Name of the call that it begins; None where it continues the last one."""
    arguments: str
    """Text of a JSON object, as the target writes it."""


class HermesParser:
    """Incremental parser of one answer: text in, content and whole calls out; text that is no call is content."""

    def __init__(self, read_call: Callable[[str], CallDelta | None] | None = None, tags: CallTags = HERMES) -> None:
        """`read_call` reads the text between the tags; by default, as JSON."""
        self._read_call = read_call or json_call
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
            body, end, after = rest.partition(end_tag)
            if not end and not is_last:
                break
            if call := self._read_call(body):
                calls.append(call)
                content += self._take(len(self._without_end(before)))
                self._text, self._has_calls, self._follows_call = after, True, True
            else:
                content += self._take(len(self._text) - len(after))
                self.has_open_call = not end
        before, begin, _ = self._text.partition(begin_tag)
        held = 0 if begin or is_last else max(overlap(before, tag) for tag in (begin_tag, *section))
        ready = before[: len(before) - held]
        return content + self._take(len(ready if is_last and not self._has_calls else self._without_end(ready))), calls

    def _take(self, size: int) -> str:
        text, self._text = self._text[:size], self._text[size:]
        if self._follows_call:
            text = self._first_edge.sub("", text, count=1)
            self._follows_call = not text
        return text

    def _without_end(self, text: str) -> str:
        """A text without the whitespace and the section's tags that it ends with."""
        edge = self._last_edge.match(text[::-1])
        return text[: len(text) - (edge.end() if edge else 0)]


def _edge(tags: Iterable[str]) -> re.Pattern[str]:
    """Whitespace and tags that a text begins with."""
    either = "|".join([r"\s+", *map(re.escape, tags)])
    return re.compile(f"(?:{either})*")


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw(b"{}")


def json_call(text: str) -> CallDelta | None:
    """The call in a text; None for one that is no call."""
    try:
        call = msgspec.json.decode(text, type=_Call)
    except (msgspec.DecodeError, RecursionError):
        return None
    arguments = bytes(call.arguments).decode()
    return CallDelta(call.name, arguments) if arguments.startswith("{") else None
