# SPDX-License-Identifier: Apache-2.0
"""Tokenises prompts on threads, up to a length; a long prompt does not delay short ones."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from dflash_trt.api.chat_template import encode, render_chat
from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TEMPLATE_FILE = "<template>"
"""File name of Jinja's compiled code."""
FEW_CHARACTERS = 512
"""Longest prompt that is tokenised on the event loop, while no thread tokenises: a thread's turn costs more."""
CHUNK_CHARACTERS = 2**16
"""Chunk in which a longer prompt is counted before it is tokenised whole."""
SLACK_TOKENS = 16
"""Tokens that a chunk may add where its end cuts a word."""
TEMPLATE_SECONDS = 5.0
"""Time limit of a chat template."""
TOKENIZER_SECONDS = 30.0
"""Time limit for counting a long prompt's tokens, checked after each chunk."""


@contextmanager
def limited_template(seconds: float, max_characters: int) -> Iterator[None]:
    """Ends the template that this thread renders with RequestError when it exceeds a limit.

    A template is the model's own program, but a request chooses what it reads.
    The time is checked at each line of a template and each call of a function, the length of the output at each piece:
    a compiled template yields them, and joins them at its end.
    """
    deadline, num_characters = time.monotonic() + seconds, 0

    def check() -> None:
        if time.monotonic() > deadline:
            raise RequestError(f"messages: the chat template takes more than {seconds:g} s")
        if num_characters > max_characters:
            raise RequestError(f"messages: the chat template writes more than {max_characters} characters")

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal num_characters
        is_template = frame.f_code.co_filename == TEMPLATE_FILE
        if is_template and event == "return" and isinstance(value, str):
            num_characters += len(value)
        check()
        return trace if is_template else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
    check()


class TokenizerPool:
    """One thread for short prompts and one for long ones, because tokenizers are not thread-safe.

    Clients take turns: each has at most one prompt at a time on these threads.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        """Refuses prompts of more than `max_length` tokens."""
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._short = ThreadPoolExecutor(1, thread_name_prefix="dflash-trt tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="dflash-trt long prompts")
        self._turns = WeakValueDictionary[str, asyncio.Lock]()
        self._in_use = threading.Lock()
        """Held while the tokenizer, not its copy, is used."""

    @cached_property
    def max_characters(self) -> int:
        """Most characters of `max_length` tokens: an entry of the vocabulary is at least as long as its text."""
        return self._max_length * max(map(len, self._tokenizer.get_vocab()))

    @cached_property
    def _copy(self) -> PreTrainedTokenizerBase:
        return copy.deepcopy(self._tokenizer)

    async def encode(self, text: str, *, client: str = "") -> list[int]:
        """Token ids of a text as it is; RequestError where it is too long."""
        if len(text) <= min(FEW_CHARACTERS, self.max_characters) and self._in_use.acquire(blocking=False):
            try:
                return encode(self._tokenizer, text)
            finally:
                self._in_use.release()
        async with self._turn(client):
            return await self._run(text, lambda tokenizer, text: encode(tokenizer, text))

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        num_bytes: int = 0,
        client: str = "",
    ) -> list[int]:
        """Token ids of a conversation in the chat template; RequestError where it is too long, or the template fails.

        `num_bytes` is the size of everything that the template may read.
        """
        if len(messages) > self._max_length:
            raise RequestError(f"messages: there are {len(messages)}; at most {self._max_length} are allowed")
        size = sum(len(str(message.get("content") or "")) for message in messages)
        self._check_characters(size)
        pool, tokenizer = self._choose(num_bytes)

        def render() -> str:
            with limited_template(TEMPLATE_SECONDS, self.max_characters):
                text = render_chat(tokenizer(), messages, tools=tools, template_kwargs=template_kwargs)
            for tool in tools:
                if (name := tool["function"]["name"]) not in text:
                    raise RequestError(
                        f"tools: neither the target's chat template nor a message writes {name} into the prompt",
                        hint="use a template that writes tools, or describe them in a system message",
                    )
            return text

        async with self._turn(client):
            text = await asyncio.get_running_loop().run_in_executor(pool, render)
            return await self._run(
                text, lambda tokenizer, text: list(tokenizer(text, add_special_tokens=False)["input_ids"])
            )

    def _turn(self, client: str) -> asyncio.Lock:
        return self._turns.setdefault(client, asyncio.Lock())

    async def _run(self, text: str, tokenize: Callable[[PreTrainedTokenizerBase, str], list[int]]) -> list[int]:
        """Runs `tokenize` on a thread; stops between chunks when the caller is cancelled."""
        self._check_characters(len(text))
        pool, tokenizer = self._choose(len(text))
        cancelled = threading.Event()

        def work() -> list[int]:
            with self._in_use if pool is self._short else nullcontext():
                self._check_tokens(tokenizer(), text, cancelled)
                return [] if cancelled.is_set() else tokenize(tokenizer(), text)

        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            cancelled.set()

    def _choose(self, size: int) -> tuple[ThreadPoolExecutor, Callable[[], PreTrainedTokenizerBase]]:
        if size > CHUNK_CHARACTERS:
            return self._long, lambda: self._copy
        return self._short, lambda: self._tokenizer

    def _check_characters(self, num_characters: int) -> None:
        if num_characters > self.max_characters:
            raise RequestError(
                f"prompt: {num_characters} characters are more than {self._max_length} tokens can have,"
                f" {self.max_characters}"
            )

    def _check_tokens(self, tokenizer: PreTrainedTokenizerBase, text: str, cancelled: threading.Event) -> None:
        """Counts the tokens of a long text by chunks, and raises RequestError as soon as they are too many."""
        num_tokens, deadline = 0, time.monotonic() + TOKENIZER_SECONDS
        for begin in range(0, len(text) if len(text) > CHUNK_CHARACTERS else 0, CHUNK_CHARACTERS):
            if cancelled.is_set():
                return
            chunk = text[begin : begin + CHUNK_CHARACTERS].encode(errors="replace").decode()
            num_tokens += len(tokenizer(chunk, add_special_tokens=False)["input_ids"]) - SLACK_TOKENS
            if num_tokens > self._max_length:
                raise RequestError(f"prompt: it has more than {self._max_length} tokens")
            if time.monotonic() > deadline:
                raise RequestError(f"prompt: the tokenizer takes more than {TOKENIZER_SECONDS:g} s")
