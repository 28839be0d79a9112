# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars beside the event loop, within a time limit.

xgrammar cannot be interrupted, and an optional item more takes it longer than the last: 1,000 of them took 8 s, 2,000
took 50 (the regex a?a?..., vocabulary 1,024, AMD EPYC). So a grammar that takes too long is left to its thread, which
does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dflash_trt.errors import RequestError
from dflash_trt.runtime.sampling import Grammar
from dflash_trt.server.limits import overloaded

COMPILE_SECONDS = 10.0
"""Time limit for waiting for a place, and then for one grammar."""
MAX_COMPILING = 4
"""Grammars compiled at once, those that nobody waits for any more included."""
LEFT_BEHIND_NICENESS = 19


class GrammarThreads:
    """A daemon thread for each grammar."""

    def __init__(self, compile_grammar: Callable[[Grammar], Any]) -> None:
        """`compile_grammar` raises RequestError for one that does not compile."""
        self.active = 0
        self._compile_grammar = compile_grammar
        self._places = asyncio.Semaphore(MAX_COMPILING)

    async def compile(self, grammar: Grammar) -> Any:
        """What `compile_grammar` returns.

        RequestError where that takes too long, HttpError 429 where others do.
        """
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                await self._places.acquire()
        except TimeoutError:
            raise overloaded(f"{self.active} grammars are being compiled") from None
        self.active += 1
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def work() -> None:
            try:
                compiled, error = self._compile_grammar(grammar), None
            except Exception as raised:
                compiled, error = None, raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._end, result, compiled, error)

        thread = threading.Thread(target=work, name="dflash-trt grammar", daemon=True)
        thread.start()
        try:
            async with asyncio.timeout(COMPILE_SECONDS):
                return await result
        except TimeoutError:
            if sys.platform == "linux":  # whose threads have priorities: decoding goes first
                os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, LEFT_BEHIND_NICENESS)
            raise RequestError(
                f"{grammar.field}: expected a {grammar.kind} that compiles within {COMPILE_SECONDS:g} s,"
                " found one that takes longer"
            ) from None

    def _end(self, result: asyncio.Future[Any], compiled: Any, error: Exception | None) -> None:
        self.active -= 1
        self._places.release()
        if result.done():  # cancelled: nobody waits
            return
        if error is None:
            result.set_result(compiled)
        else:
            result.set_exception(error)
