# SPDX-License-Identifier: Apache-2.0
"""Text of a growing answer: whole characters only, and none that may begin a stop text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream
    from transformers import PreTrainedTokenizerBase

    from dflash_trt import _C


class TextStream:
    """Turns tokens into text incrementally; ends before the first stop text that ends after `min_tokens` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.stopped_by: str | None = None
        """The stop text before which it ended."""
        self._tokenizer = tokenizer
        self._decoder = _decode_stream()
        self.stop = stop
        self._min_tokens = min_tokens
        self.answer: _C.Answer | None = None
        """The answer that it is the text of, if its tokens are not pushed."""
        self._token_ids: list[int] = []
        self._num_decoded = 0
        self._is_closed = False
        self._pieces: list[str] = []
        """All text; it is joined only when asked for, since it may be long."""
        self._new: list[str] = []
        """Pieces since `next_text`, and what it held back."""
        self._end = ""
        """Characters at the end that a stop text may begin in, and that have been searched."""
        self._longest = max(map(len, stop), default=0)
        self._num_unsearched = 0
        self._begun = [0] * len(stop)
        """Characters of each stop text with which the searched text ends."""

    @property
    def text(self) -> str:
        """All text so far, but for a character whose bytes are not complete."""
        if not self._is_closed:
            self.take_new()
            self._catch_up()
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def push(self, token: int) -> bool:
        """Appends one token; whether it completes a stop text."""
        self.extend((token,))
        return self.stopped_by is not None

    def extend(self, token_ids: Sequence[int]) -> int:
        """Appends tokens up to the one that completes a stop text; their number. Other text is made when asked for."""
        if not self.stop:
            self._token_ids += token_ids
            return len(token_ids)
        for count, token in enumerate(token_ids, 1):
            self._token_ids.append(token)
            self._catch_up()
            if self.stopped_by is not None:
                return count
        return len(token_ids)

    def take_new(self) -> int:
        """Takes the new tokens of its answer, up to the one that completes a stop text; how many tokens it has now."""
        if self.answer is not None and (token_ids := self.answer.token_ids(len(self._token_ids))):
            self.extend(token_ids)
        return len(self._token_ids)

    def close(self) -> None:
        """Ends the text; the tokenizer decodes the bytes of an incomplete character."""
        self.take_new()
        if self._num_decoded > 0:
            self._catch_up()
        text, self._is_closed = "".join(self._pieces), True
        whole = str(self._tokenizer.decode(self._token_ids, skip_special_tokens=True))
        if self.stopped_by is None and whole.startswith(text):
            self._grow(whole[len(text) :])

    def next_text(self) -> str:
        """The text since the last call; before the end without what may be the beginning of a stop text."""
        if not self._is_closed:
            self.take_new()
            self._catch_up()
        text, unsearched = "".join(self._new), self._num_unsearched
        # A stop text begins in the pending text or in the new text.
        pairs = zip(self.stop, self._begun, strict=True)
        self._begun = [overlap(text[max(0, len(text) - begun - unsearched) :], stop) for stop, begun in pairs]
        held = 0 if self._is_closed else max(self._begun, default=0)
        self._new, self._num_unsearched = [text[len(text) - held :]], 0
        return text[: len(text) - held]

    def _catch_up(self) -> None:
        while self._num_decoded < len(self._token_ids):
            token = self._token_ids[self._num_decoded]
            self._num_decoded += 1
            if piece := self._decode(token):
                self._grow(piece)

    def _decode(self, token: int) -> str | None:
        try:
            return self._decoder.step(self._tokenizer.backend_tokenizer, token)
        except Exception:  # findings/tokenizers_decode_stream_raises_after_a_broken_byte.sh; it has no other type
            self._decoder = _decode_stream()
            return self._decoder.step(self._tokenizer.backend_tokenizer, token)

    def _grow(self, piece: str) -> None:
        # A stop text that was not there before ends in the new piece.
        text, begin = self._end + piece, len(self._end) + 1
        searched = self.stop if self._num_decoded > self._min_tokens else ()
        ends = [(at, stop) for stop in searched if (at := text.find(stop, max(0, begin - len(stop)))) >= 0]
        if ends:
            end, self.stopped_by = min(ends)
            cut = len(self._end) - end
            piece = piece[: max(0, -cut)]
            if cut > 0:
                self._pieces, self._new = (["".join(pieces)[:-cut]] for pieces in (self._pieces, self._new))
        self._pieces.append(piece)
        self._new.append(piece)
        self._num_unsearched += len(piece)
        self._end = text[-self._longest :] if self._longest else ""


def _decode_stream() -> DecodeStream:
    from tokenizers.decoders import DecodeStream

    return DecodeStream(skip_special_tokens=True)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
