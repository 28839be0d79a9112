# SPDX-License-Identifier: Apache-2.0
"""Masks of one answer: each row of a verify pass is masked as plain decoding would mask it there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import RequestError
from dflash_trt.runtime.grammars.patterns import reason


class GuidedDecoding:
    """Masks tokens that do not continue a text of the grammar; once it is complete, all but end tokens."""

    def __init__(self, matcher: Any, vocab_size: int, end_ids: Collection[int], field: str) -> None:
        """`matcher` is an llguidance.LLMatcher of its own; `field` is named in errors."""
        self._matcher = matcher
        self._field = field
        self._end_ids = end_ids
        self._has_ended = False
        self._mask = TokenMask(vocab_size)

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Masks the rows [K + 1, V] up to the first proposal that does not match; the matcher stays where it is.

        RequestError for a grammar that takes too much work, here or in `advance`.
        """
        self._check()
        # An end token is a step of llguidance 1.9.1 only where the text could go on, so none is ever consumed.
        # No refused draft is consumed either: findings/llguidance_refused_token_ends_the_matcher.sh
        drafts = list(takewhile(lambda token: token not in self._end_ids, proposals))
        num_valid = self._matcher.validate_tokens(drafts) if drafts else 0
        self._mask.apply(self._matcher, logits[0])
        for row, token in zip(logits[1:], drafts[:num_valid], strict=False):
            self._matcher.consume_token(token)
            self._mask.apply(self._matcher, row)
        self._check()
        if num_valid:
            self._matcher.rollback(num_valid)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advances the matcher up to the end token; accepted tokens after it do not count.

        Where that takes too much work, `process` says so: the tokens are already the answer's.
        """
        for token in token_ids:
            self._has_ended = self._has_ended or token in self._end_ids
            if not self._has_ended:
                self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """Tokens that must come next, each the only one that its row leaves; [] where there is a choice."""
        return [] if self._has_ended else list(self._matcher.compute_ff_tokens())

    def _check(self) -> None:
        if error := self._matcher.get_error():
            raise RequestError(f"{self._field}: the grammar takes too much work for a token: {reason(error)}")


class TokenMask:
    """Bits of the tokens that a grammar allows next, one for each of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._words = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def allowed(self, matcher: Any) -> npt.NDArray[np.uint8]:
        """Whether each token [V] may follow what `matcher` has consumed; none may after an error of the matcher."""
        self._words.fill(0)
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little")

    def apply(self, matcher: Any, row: npt.NDArray[np.float32]) -> None:
        """Sets the logits [V] of other tokens to -infinity."""
        row[self.allowed(matcher) == 0] = -np.inf
