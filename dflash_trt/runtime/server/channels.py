# SPDX-License-Identifier: Apache-2.0
"""Splits gpt-oss's harmony format into reasoning (the analysis channel), tool calls and content (the other channels).

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

Calls in Hermes's format, which Qwen2.5 and Qwen3 share: <tool_call>{"name": ..., "arguments": {...}}</tool_call>.

transformers 5.24's ResponseParser reports the name of a call only after its arguments, and raises for text that is no
JSON; here the name comes first, and such text is content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.runtime.text import TextStream, overlap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
OPTIONAL = ("<|return|>", "<|call|>")
REASONING_CHANNEL = "analysis"
# openai-harmony 0.0.8 parses only tokens of its own vocabulary, which it downloads when it is first used; here tokens
# are those of the target's tokenizer.
RECIPIENT = re.compile(r"to=functions\.([\w-]+)")


class ChannelTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of harmony's control tokens."""

    start: int
    channel: int
    message: int
    ends: frozenset[int]

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerBase) -> ChannelTokens | None:
        """Reads them from a tokenizer; None where it lacks one."""
        vocabulary = tokenizer.get_added_vocab()
        if not all(token in vocabulary for token in TOKENS):
            return None
        ends = {vocabulary[token] for token in ("<|start|>", "<|end|>", *OPTIONAL) if token in vocabulary}
        return cls(
            start=vocabulary["<|start|>"],
            channel=vocabulary["<|channel|>"],
            message=vocabulary["<|message|>"],
            ends=frozenset(ends),
        )


class Channels:
    """Incremental parser of one response: tokens in, reasoning, content and calls out; headers are dropped."""

    def __init__(
        self,
        tokens: ChannelTokens,
        tokenizer: PreTrainedTokenizerBase,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        has_tools: bool = False,
    ) -> None:
        """Cuts each message at a `stop` text that ends behind `min_tokens` tokens of the response.

        With tools, a message to a function is a call.
        """
        self._has_tools = has_tools
        self._role: Sequence[int] = ()
        self._function: str | None = None
        self.has_open_call = False
        """Whether the answer ended inside the arguments of a call."""
        self.num_reasoning_tokens = 0
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._stop = stop
        self._num_early = min_tokens
        self._header: list[int] | None = None
        self._is_reasoning = False
        self._text: TextStream | None = self._open()

    def push(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[str, str, list[CallDelta]]:
        """Returns what the tokens add to (reasoning, content, calls)."""
        added = ["", ""]
        calls: list[CallDelta] = []
        for token in token_ids:
            self._num_early = max(0, self._num_early - 1)
            if token == self._tokens.channel or token in self._tokens.ends:
                self._close(added, calls)
                self._role = (self._header or ()) if token == self._tokens.channel else ()
                self._header = [] if token in (self._tokens.channel, self._tokens.start) else None
            elif token == self._tokens.message:
                self._close(added, calls)
                self._read_header()
                self._header, self._text = None, self._open()
                if self._function is not None:
                    calls.append(CallDelta(self._function, ""))
            elif self._header is not None:
                self._header.append(token)
            elif self._text is not None:
                self._text.push(token)
                self.num_reasoning_tokens += self._is_reasoning
        if is_last:
            self.has_open_call = self._function is not None
            self._close(added, calls)
        elif self._text is not None:
            self._take(added, calls)
        return added[0], added[1], calls

    def _open(self) -> TextStream:
        return TextStream(self._tokenizer, self._stop, self._num_early)

    def _close(self, added: list[str], calls: list[CallDelta]) -> None:
        """Ends the text of a message; tokens up to the next message are no text."""
        if self._text is not None:
            self._text.close()
            self._take(added, calls)
        self._text = self._function = None

    def _take(self, added: list[str], calls: list[CallDelta]) -> None:
        assert self._text is not None
        if not (text := self._text.next_text()):
            return
        if self._function is None:
            added[not self._is_reasoning] += text
        else:
            calls.append(CallDelta(None, text))

    def _read_header(self) -> None:
        """Reads channel and recipient, which stand after <|channel|>; the recipient may also precede it."""
        role, header = (str(self._tokenizer.decode(list(ids))) for ids in (self._role, self._header or []))
        self._is_reasoning = header.split()[:1] == [REASONING_CHANNEL]
        recipient = RECIPIENT.search(f"{role} {header}") if self._has_tools else None
        self._function = recipient and recipient[1]
