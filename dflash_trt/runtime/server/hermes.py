# SPDX-License-Identifier: Apache-2.0
"""Splits text into content and tool calls in Hermes's format, which Qwen2.5 and Qwen3 share.

<tool_call>{"name": ..., "arguments": {...}}</tool_call>

transformers 5.24's ResponseParser raises for text that is no JSON; here such text is content.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dflash_trt.runtime.text import overlap

BEGIN, END = "<tool_call>", "</tool_call>"


class CallDelta(msgspec.Struct, frozen=True):
    """A call, or the part of one, that a chunk of an answer adds."""

    name: str | None
    """Name of the call that it begins; None where it continues the last one."""
    arguments: str
    """Text of a JSON object, as the target writes it."""


class HermesParser:
    """Incremental parser of one answer: text in, content and whole calls out; text that is no call is content."""

    def __init__(self, read_call: Callable[[str], CallDelta | None] | None = None) -> None:
        """`read_call` reads the text between the tags; by default, as JSON."""
        self._read_call = read_call or json_call
        self.has_open_call = False
        """Whether the answer ended inside a call; its text is content."""
        self._text = ""
        self._has_calls = self._follows_call = False

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        """Returns what `text` adds to (content, calls); drops whitespace around calls."""
        self._text += text
        content, calls = "", list[CallDelta]()
        while BEGIN in self._text:
            before, _, rest = self._text.partition(BEGIN)
            body, end, after = rest.partition(END)
            if not end and not is_last:
                break
            if call := self._read_call(body):
                calls.append(call)
                content += self._take(len(before.rstrip()))
                self._text, self._has_calls, self._follows_call = after, True, True
            else:
                content += self._take(len(self._text) - len(after))
                self.has_open_call = not end
        before, begin, _ = self._text.partition(BEGIN)
        ready = before if begin or is_last else before[: len(before) - overlap(before, BEGIN)]
        return content + self._take(len(ready if is_last and not self._has_calls else ready.rstrip())), calls

    def _take(self, size: int) -> str:
        text, self._text = self._text[:size], self._text[size:]
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        return text


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
