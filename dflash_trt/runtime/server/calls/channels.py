# SPDX-License-Identifier: Apache-2.0
"""Splits gpt-oss's harmony format into reasoning (the analysis channel), tool calls and content (the other channels).

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.runtime.server.calls.hermes import CallDelta
from dflash_trt.runtime.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
OPTIONAL = ("<|return|>", "<|call|>")
REASONING_CHANNEL = "analysis"
# openai-harmony 0.0.8 parses only its own vocabulary, which it downloads at first use; targets have other token ids.
RECIPIENT = re.compile(r"to=functions\.([\w-]+)")


class ChannelTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of harmony's control tokens."""

    start: int
    channel: int
    message: int
    end: int
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
            end=vocabulary["<|end|>"],
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
        """Cuts each message at a `stop` text that ends after the first `min_tokens` tokens of the response.

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
