# SPDX-License-Identifier: Apache-2.0
"""Logits processors: they change the target's logits before tokens are drawn, or drafts compared with them.

Each row of a verify pass is changed as plain decoding would change it there, so drafts stay lossless.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError, cut

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LogitsProcessor(Protocol):
    """Processor of one request's logits."""

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Changes rows [K + 1, V] in place; row r follows the answer so far and `proposals` [:r].

        Rows after a proposal that its row has ruled out (-infinity) may be left unchanged. A RequestError ends the
        request.
        """

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens that were appended to the answer."""


class LogitBias:
    """Adds to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._token_ids = list(bias)
        self._bias = list(bias.values())

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Adds the bias to each row."""
        logits[:, self._token_ids] += self._bias

    def advance(self, token_ids: Sequence[int]) -> None:
        """Does nothing: the bias is the same everywhere."""


class MinTokens:
    """Rules out the tokens that would end an answer before it has `num_tokens` tokens."""

    def __init__(self, num_tokens: int, stop_ids: Iterable[int]) -> None:
        self._num_left = num_tokens
        self._stop_ids = list(stop_ids)

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Masks the rows of tokens that come too early."""
        logits[: self._num_left, self._stop_ids] = -np.inf

    def advance(self, token_ids: Sequence[int]) -> None:
        """Counts the tokens."""
        self._num_left = max(0, self._num_left - len(token_ids))


KEPT_BYTES = 2**23
"""Bytes of compiled grammars to keep, as xgrammar counts them; the process grows by about twice that."""
BURST_SECONDS, ROW_SECONDS = 0.25, 0.01
"""CPU time for matching: of a request, and for each row. All requests wait for it, so a grammar that takes more ends
its own. JSON takes about 0.05 ms a row; nested counted repetition, ((a{1,9}){1,9}){1,9}, takes more with each token."""
MAX_WHITESPACE = 32
"""Whitespace allowed between two tokens of JSON, so that no model indents for ever."""


class GrammarCompiler:
    """Compiles grammars over one vocabulary, from any thread, and keeps the compiled ones."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, stop_ids: Collection[int]) -> None:
        """An answer ends with one of `stop_ids`; RequestError where these, the tokenizer or xgrammar are missing."""
        if tokenizer is None or not stop_ids:
            missing = "a tokenizer" if tokenizer is None else "end-of-sequence tokens"
            raise RequestError(f"structured_outputs: expected a target with {missing}, found none")
        try:
            import xgrammar
        except ImportError:
            raise RequestError(
                "structured_outputs: expected the package xgrammar, which is not installed",
                hint="pip install 'dflash-trt[serve]'",
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
        self._info = info
        self._compiler = new_compiler(info)
        self._new_matcher = xgrammar.GrammarMatcher
        self._read_compiled = xgrammar.CompiledGrammar.deserialize_json
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._in_use: WeakValueDictionary[Grammar, Any] = WeakValueDictionary()
        self._kept: OrderedDict[Grammar, tuple[Any, int]] = OrderedDict()

    def compile(self, grammar: Grammar) -> Any:
        """xgrammar's compiled grammar; RequestError for one that does not compile."""
        compiled = self.known(grammar)
        return self._keep(grammar, compile_grammar(self._compiler, grammar) if compiled is None else compiled)

    def known(self, grammar: Grammar) -> Any:
        """Compiled grammar that is in use or was used recently; else None."""
        with self._lock:
            return self._in_use.get(grammar)

    @cached_property
    def vocabulary(self) -> str:
        """Serialized vocabulary, for `read_vocabulary` in another process."""
        return str(self._info.serialize_json())

    def add(self, grammar: Grammar, serialized: str) -> Any:
        """Keeps a grammar that another process with this vocabulary has compiled."""
        return self._keep(grammar, self._read_compiled(serialized, self._info))

    def _keep(self, grammar: Grammar, compiled: Any) -> Any:
        with self._lock:
            self._in_use[grammar] = compiled
            _, size = self._kept.pop(grammar, None) or (compiled, compiled.memory_size_bytes)
            self._kept[grammar] = (compiled, size)
            num_bytes = sum(size for _, size in self._kept.values())
            while num_bytes > KEPT_BYTES and len(self._kept) > 1:
                num_bytes -= self._kept.popitem(last=False)[1][1]
        return compiled

    def processor(self, grammar: Grammar) -> GuidedDecoding:
        """Processor for a new request."""
        return GuidedDecoding(self._new_matcher(self.compile(grammar)), self._vocab_size, grammar.field)


def new_compiler(info: Any) -> Any:
    """xgrammar's compiler for an xgrammar.TokenizerInfo."""
    import xgrammar

    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def read_vocabulary(serialized: str) -> Any:
    """xgrammar's compiler for `GrammarCompiler.vocabulary`."""
    import xgrammar

    return new_compiler(xgrammar.TokenizerInfo.deserialize_json(serialized))


def compile_grammar(compiler: Any, grammar: Grammar) -> Any:
    """xgrammar's compiled grammar; RequestError for one that does not compile."""
    try:
        options = {"max_whitespace_cnt": MAX_WHITESPACE} if grammar.kind == "json_schema" else {}
        return getattr(compiler, f"compile_{grammar.kind}")(grammar.text, **options)
    except Exception as error:  # xgrammar 0.2.8 raises RuntimeError, TypeError, ValueError and pydantic's errors
        problem = cut(str(error).strip().partition("] ")[2] or str(error))
        raise RequestError(f"{grammar.field}: expected a {grammar.kind} that compiles, found: {problem}") from None


def _no_text(token: int) -> bytes:
    """Bytes of a special token, which no text of a grammar matches; a grammar may still name the token itself."""
    return b"\xff%d" % token


class GuidedDecoding:
    """Masks tokens that do not continue a text of the grammar; once it is complete, all but stop tokens.

    Each row of a verify pass is masked as plain decoding would mask it.
    """

    def __init__(self, matcher: Any, vocab_size: int, field: str = "structured_outputs") -> None:
        """`field` is named in errors."""
        self._matcher = matcher
        self._field = field
        self._seconds_left = BURST_SECONDS
        self._vocab_size = vocab_size
        self._has_failed = False
        self._bitmask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)

    def process(self, logits: npt.NDArray[np.float32], proposals: Sequence[int]) -> None:
        """Masks rows along the matching `proposals`, then rolls back; RequestError for a grammar that is too slow."""
        if self._has_failed:
            logits.fill(-np.inf)
            return
        num_matched = 0
        for row, proposal in zip_longest(logits, proposals):
            self._seconds_left = min(BURST_SECONDS, self._seconds_left + ROW_SECONDS)
            with self._charged():
                is_matched = self._process_row(row, proposal)
            if self._seconds_left < 0:
                raise RequestError(
                    f"{self._field}: expected a grammar that takes at most {1e3 * ROW_SECONDS:g} ms a token to match,"
                    " found one that takes more"
                )
            num_matched += is_matched
            if not is_matched or self._matcher.is_terminated():
                break
        self._matcher.rollback(num_matched)

    def _process_row(self, row: npt.NDArray[np.float32], proposal: int | None) -> bool:
        """Masks a row; accepts the proposal and returns True if it matches."""
        self._matcher.fill_next_token_bitmask(self._bitmask)
        bits = np.unpackbits(self._bitmask.view(np.uint8), count=self._vocab_size, bitorder="little")
        row[bits == 0] = -np.inf
        return proposal is not None and bool(bits[proposal]) and bool(self._matcher.accept_token(proposal))

    def advance(self, token_ids: Sequence[int]) -> None:
        """Advances the matcher up to the stop token; accepted tokens after it do not count."""
        with self._charged():
            for token in token_ids:
                if self._matcher.is_terminated():
                    return
                if not self._matcher.accept_token(token):  # not by its own mask
                    self._has_failed = True

    @contextmanager
    def _charged(self) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self._seconds_left -= time.thread_time() - begin
