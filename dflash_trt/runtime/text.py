# SPDX-License-Identifier: Apache-2.0
"""Text of a growing answer: whole characters only, and none that may begin a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream
    from transformers import PreTrainedTokenizerBase


class TextStream:
    """Turns tokens into text incrementally; ends before the first stop text that ends after `min_tokens` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._text = ""
        self.stopped_by: str | None = None
        """The stop text before which it ended."""
        self._tokenizer = tokenizer
        self._decoder = _decode_stream()
        self._stop = stop
        self._min_tokens = min_tokens
        self._token_ids: list[int] = []
        self._num_decoded = 0
        self._is_closed = False
        self._returned = self._num_searched = 0
        self._begun = [0] * len(stop)
        """Characters of each stop text with which the text ends."""

    @property
    def text(self) -> str:
        """All text so far, but for a character whose bytes are not complete."""
        if not self._is_closed:
            self._catch_up()
        return self._text

    def push(self, token: int) -> bool:
        """Appends one token; whether it completes a stop text. Where there is none, text is made when asked for."""
        self._token_ids.append(token)
        if self._stop:
            self._catch_up()
        return self.stopped_by is not None

    def close(self) -> None:
        """Ends the text; the tokenizer decodes the bytes of an incomplete character."""
        self._is_closed = True
        if self._num_decoded > 0:
            self._catch_up()
        whole = str(self._tokenizer.decode(self._token_ids, skip_special_tokens=True))
        if self.stopped_by is None and whole.startswith(self._text):
            self._grow(whole)

    def next_text(self) -> str:
        """The text since the last call; before the end without what may be the beginning of a stop text."""
        text = self.text
        unsearched, self._num_searched = len(text) - self._num_searched, len(text)
        # A stop text begins in the pending text or in the new text.
        pairs = zip(self._stop, self._begun, strict=True)
        self._begun = [overlap(text[len(text) - begun - unsearched :], stop) for stop, begun in pairs]
        held = 0 if self._is_closed else max(self._begun, default=0)
        begin, self._returned = self._returned, len(text) - held
        return text[begin : self._returned]

    def _catch_up(self) -> None:
        for token in self._token_ids[self._num_decoded :]:
            self._num_decoded += 1
            if piece := self._decode(token):
                self._grow(self._text + piece)

    def _decode(self, token: int) -> str | None:
        try:
            return self._decoder.step(self._tokenizer.backend_tokenizer, token)
        except Exception:  # findings/tokenizers_decode_stream_raises_after_a_broken_byte.sh; it has no other type
            self._decoder = _decode_stream()
            return self._decoder.step(self._tokenizer.backend_tokenizer, token)

    def _grow(self, text: str) -> None:
        # A stop text that was not there before ends in the new piece.
        begin, searched = len(self._text) + 1, self._stop if self._num_decoded > self._min_tokens else ()
        ends = [(at, stop) for stop in searched if (at := text.find(stop, max(0, begin - len(stop)))) >= 0]
        end, self.stopped_by = min(ends, default=(len(text), None))
        self._text = text[:end]


def _decode_stream() -> DecodeStream:
    from tokenizers.decoders import DecodeStream

    return DecodeStream(skip_special_tokens=True)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
