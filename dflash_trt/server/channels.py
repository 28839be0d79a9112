# SPDX-License-Identifier: Apache-2.0
"""Splits gpt-oss's harmony format into reasoning (its analysis channel) and content (the other channels).

<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.runtime.text import TextStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
OPTIONAL = ("<|return|>", "<|call|>")
REASONING_CHANNEL = "analysis"


class ChannelTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Ids of harmony's control tokens."""

    channel: int
    message: int
    ends: frozenset[int]

    @classmethod
    def read(cls, tokenizer: PreTrainedTokenizerBase) -> ChannelTokens | None:
        """None where the tokenizer lacks one of them."""
        vocabulary = tokenizer.get_added_vocab()
        if not all(token in vocabulary for token in TOKENS):
            return None
        ends = {vocabulary[token] for token in ("<|start|>", "<|end|>", *OPTIONAL) if token in vocabulary}
        return cls(channel=vocabulary["<|channel|>"], message=vocabulary["<|message|>"], ends=frozenset(ends))


class Channels:
    """Incremental parser of one response: tokens in, reasoning and content out; headers are in neither."""

    def __init__(self, tokens: ChannelTokens, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        """Each message's text ends before a `stop` string."""
        self.num_reasoning_tokens = 0
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._stop = stop
        self._header: list[int] | None = None
        self._is_reasoning = False
        self._text: TextStream | None = self._open()

    def push(self, token_ids: Sequence[int], *, is_last: bool) -> tuple[str, str]:
        """What they add to (reasoning, content)."""
        added = ["", ""]
        for token in token_ids:
            if token == self._tokens.channel or token in self._tokens.ends:
                self._close(added)
                self._header = [] if token == self._tokens.channel else None
            elif token == self._tokens.message:
                self._is_reasoning = self._name() == REASONING_CHANNEL
                self._header, self._text = None, self._open()
            elif self._header is not None:
                self._header.append(token)
            elif self._text is not None:
                self._text.push(token)
                self.num_reasoning_tokens += self._is_reasoning
        if is_last:
            self._close(added)
        elif self._text is not None:
            added[not self._is_reasoning] += self._text.next_text()
        return added[0], added[1]

    def _open(self) -> TextStream:
        return TextStream(self._tokenizer, self._stop)

    def _close(self, added: list[str]) -> None:
        """Ends a message's text; what comes before the next one's is no text."""
        if self._text is not None:
            self._text.close()
            added[not self._is_reasoning] += self._text.next_text()
        self._text = None

    def _name(self) -> str:
        words = str(self._tokenizer.decode(self._header or [])).split()
        return words[0] if words else ""
