# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars over one vocabulary with llguidance, in bounded time and memory."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError, cut
from dflash_trt.runtime.grammars.guided_decoding import GuidedDecoding, TokenMask
from dflash_trt.runtime.grammars.guided_vocabulary import read_vocabulary
from dflash_trt.runtime.grammars.json_schema import checked_schema
from dflash_trt.runtime.grammars.lark import choice_to_lark, grammar_to_lark, regex_to_lark
from dflash_trt.runtime.grammars.patterns import reason
from dflash_trt.runtime.grammars.structural_tags import structural_tag_to_lark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 2**16
TOOLS, MAX_TOOL_CHARACTERS = "tools", 2**20
"""Field of grammars that the server writes from tools of at most MAX_CHARACTERS, and characters of one."""
MAX_NESTING = {"json_schema": 64, "structural_tag": 64, "choice": MAX_CHARACTERS, "regex": 32, "grammar": 32}
"""Levels of brackets: Python's and Rust's parsers recurse."""
NUM_THREADS = 2
STACK_BYTES = 2**28
"""Stack of a thread that compiles, of which only used pages take memory: llguidance 1.9.1 recurses along references."""
NUM_KEPT = 32
"""Compiled grammars to keep."""
LIMITS = {
    "max_items_in_row": 1000, "initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "step_max_items": 3000,
    "max_lexer_states": 10_000, "max_grammar_size": 50_000, "verbose_errors": False,
}  # fmt: skip
"""Fields of llguidance.LLParserLimits: an object with 300 optional properties needs 2,000 items in a step."""


class GrammarCompiler:
    """Compiles grammars on threads of its own, and keeps the last ones; any thread may use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, end_ids: Collection[int]) -> None:
        """An answer ends with one of `end_ids`.

        Raises RequestError where these, a fast tokenizer or llguidance are missing.
        """
        if tokenizer is None or not end_ids:
            missing = "no tokenizer" if tokenizer is None else "no end-of-sequence tokens"
            raise RequestError(f"structured_outputs: the target has {missing}")
        try:
            import llguidance
        except ImportError:
            raise RequestError(
                "structured_outputs: the package llguidance is not installed", hint="pip install 'dflash-trt[serve]'"
            ) from None
        self._tokenizer, self._special_tokens, self._visible = read_vocabulary(tokenizer, vocab_size, end_ids)
        self._new_matcher = llguidance.LLMatcher
        self._limits = llguidance.LLParserLimits(**LIMITS)
        self._vocab_size = vocab_size
        self._end_ids = frozenset(end_ids)
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = _threads()

    def submit(self, grammar: Grammar) -> Future[Any]:
        """Compiles a grammar in the background; the future's RequestError says what cannot be enforced."""
        with self._lock:
            if (kept := self._kept.get(grammar)) is None:
                return self._threads.submit(self._compile, grammar)
            self._kept.move_to_end(grammar)
        future: Future[Any] = Future()
        future.set_result(kept)
        return future

    def processor(self, grammar: Grammar) -> GuidedDecoding:
        """Processor for a new request; RequestError for a grammar that cannot be enforced."""
        matcher = self.submit(grammar).result().deep_copy()
        return GuidedDecoding(matcher, self._vocab_size, self._end_ids, grammar.field)

    def _compile(self, grammar: Grammar) -> Any:
        text = self._source(bounded(grammar))
        matcher = self._new_matcher(self._tokenizer, text, log_level=0, limits=self._limits)
        allowed = TokenMask(self._vocab_size).allowed(matcher)
        error = matcher.get_error()
        if "NoExtension" in error or not (error or allowed.any()):
            raise RequestError(f"{grammar.field}: no text matches the {grammar.kind}")
        if error:
            raise RequestError(f"{grammar.field}: the {grammar.kind} cannot be enforced: {reason(error)}")
        with self._lock:
            self._kept[grammar] = matcher
            if len(self._kept) > NUM_KEPT:
                self._kept.popitem(last=False)
        return matcher

    def _source(self, grammar: Grammar) -> str:
        """The grammar in llguidance's language."""
        field = grammar.field
        if grammar.kind == "json_schema":
            return str(self._new_matcher.grammar_from_json_schema(checked_schema(_object(grammar), field)))
        if grammar.kind == "structural_tag":
            tag, special = _object(grammar), self._special_tokens
            return structural_tag_to_lark(tag, special, self._visible, self._vocab_size, field)
        if grammar.kind == "grammar":
            return str(self._new_matcher.grammar_from_lark(grammar_to_lark(grammar.text, self._special_tokens, field)))
        to_lark = regex_to_lark if grammar.kind == "regex" else choice_to_lark
        return str(self._new_matcher.grammar_from_lark(to_lark(grammar.text, field)))


def _threads() -> ThreadPoolExecutor:
    """Threads with a large stack, started at once: the size is a setting of the whole process."""
    threads = ThreadPoolExecutor(NUM_THREADS, "dflash-trt grammar")
    barrier = threading.Barrier(NUM_THREADS + 1)
    before = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(NUM_THREADS):
            threads.submit(barrier.wait)
    finally:
        threading.stack_size(before)
    barrier.wait()
    return threads


def bounded(grammar: Grammar) -> Grammar:
    """Returns `grammar`; RequestError for one with too many characters or levels of brackets."""
    most = MAX_TOOL_CHARACTERS if grammar.field == TOOLS else MAX_CHARACTERS
    if (size := len(grammar.text)) > most:
        raise RequestError(f"{grammar.field}: {size} characters of a {grammar.kind} are more than {most}")
    limit = MAX_NESTING[grammar.kind]
    change = {"(": 1, ")": -1} if grammar.kind in ("regex", "grammar") else {"{": 1, "[": 1, "}": -1, "]": -1}
    if max(accumulate(change.get(c, 0) for c in grammar.text), default=0) > limit:
        raise RequestError(f"{grammar.field}: the {grammar.kind} has more than {limit} levels of brackets")
    return grammar


def _object(grammar: Grammar) -> dict[str, Any]:
    try:
        return msgspec.json.decode(grammar.text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise RequestError(f"{grammar.field}: the {grammar.kind} is no JSON object: {cut(str(error))}") from None
