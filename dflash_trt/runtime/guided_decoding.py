# SPDX-License-Identifier: Apache-2.0
"""Answers that match a grammar, by xgrammar: each row of a verify pass is masked as plain decoding would mask it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dflash_trt.errors import RequestError, cut
from dflash_trt.runtime.sampling import Grammar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHE_BYTES = 2**28
"""Compiled grammars that are kept."""
MAX_WHITESPACE = 32
"""Characters between two tokens of JSON, so that no model indents for ever."""


class GrammarCompiler:
    """Compiles grammars over one vocabulary; from any thread, and what was compiled before at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, stop_ids: Collection[int]) -> None:
        """An answer ends with one of `stop_ids`. Raises RequestError where that, or what it needs, is missing."""
        if tokenizer is None or not stop_ids:
            missing = "a tokenizer" if tokenizer is None else "end-of-sequence tokens"
            raise RequestError(f"structured_outputs: expected a target with {missing}, found none")
        try:
            import xgrammar
        except ImportError:
            raise RequestError(
                "structured_outputs: expected the package xgrammar, which is not installed",
                hint="pip install 'dflash-trt[guided]'",
            ) from None
        plain = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=sorted(stop_ids)
        )
        special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        info = xgrammar.TokenizerInfo(
            [_no_text(i) if i in special else text for i, text in enumerate(plain.decoded_vocab)],
            xgrammar.VocabType.RAW,
            vocab_size=vocab_size,
            stop_token_ids=sorted(stop_ids),
            add_prefix_space=plain.add_prefix_space,
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)
        self._new_matcher = xgrammar.GrammarMatcher
        self._vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> Any:
        """xgrammar's compiled grammar; RequestError for one that does not compile."""
        try:
            options = {"max_whitespace_cnt": MAX_WHITESPACE} if grammar.kind == "json_schema" else {}
            return getattr(self._compiler, f"compile_{grammar.kind}")(grammar.text, **options)
        except Exception as error:  # xgrammar 0.2.8 raises RuntimeError, TypeError, ValueError and pydantic's errors
            problem = cut(str(error).strip().partition("] ")[2] or str(error))
            raise RequestError(f"{grammar.field}: expected a {grammar.kind} that compiles, found: {problem}") from None

    def processor(self, grammar: Grammar) -> GuidedDecoding:
        """Of a new request."""
        return GuidedDecoding(self._new_matcher(self.compile(grammar)), self._vocab_size)


def _no_text(token: int) -> bytes:
    """Of a special token, which answers do not show: no text of a grammar matches it, but the token itself may."""
    return b"\xff%d" % token


class GuidedDecoding:
    """Masks what does not continue a text of the grammar; when it is complete, all but stop tokens."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._has_failed = False
        self._bitmask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Goes along `proposals` as far as they match, and back."""
        if self._has_failed:
            logits.fill(-np.inf)
            return
        num_matched = 0
        for row, proposal in zip_longest(logits, proposals):
            self._matcher.fill_next_token_bitmask(self._bitmask)
            bits = np.unpackbits(self._bitmask.view(np.uint8), count=self._vocab_size, bitorder="little")
            row[bits == 0] = -np.inf
            if proposal is None or not bits[proposal] or not self._matcher.accept_token(proposal):
                break
            num_matched += 1
            if self._matcher.is_terminated():
                break
        self._matcher.rollback(num_matched)

    def advance(self, token_ids: Sequence[int]) -> None:
        """As far as the answer goes; it ends with the stop token, whatever was accepted behind it."""
        for token in token_ids:
            if self._matcher.is_terminated():
                return
            if not self._matcher.accept_token(token):  # not by its own mask
                self._has_failed = True
