# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars beside the event loop, in bounded time, memory and number.

xgrammar takes more than linear time: 1,000 optional items took 8 s, 2,000 took 50 (the regex a?a?..., vocabulary
1,024, AMD EPYC). It cannot be interrupted, so it runs in processes that are killed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.runtime.server import grammar_worker
from dflash_trt.runtime.server.client_limits import overloaded
from dflash_trt.runtime.server.grammar_worker import GrammarWorker
from dflash_trt.runtime.server.http_error import shutting_down
from dflash_trt.runtime.server.served_backend import Grammars

PLACE_SECONDS = 10.0
"""Time limit for waiting for a place."""
MAX_COMPILING = 4
"""Grammars compiled at once, each in a process."""
MAX_COMPILING_PER_CLIENT = 2
"""Grammars compiled at once for one client: with three on two cores, p99 of others was 1.7 times as long."""
T = TypeVar("T")


class _Place:
    """Room for one process, which starts when it is first needed."""

    worker: GrammarWorker | None = None


class GrammarProcesses:
    """Pool of compiler processes, which grows to the number of grammars compiled at once."""

    def __init__(self, compiler: Callable[[], Grammars]) -> None:
        """`compiler` returns where compiled grammars are kept; RequestError where there can be none."""
        self._new_compiler = compiler
        self._opened: asyncio.Future[Grammars] | None = None
        self._is_closed = False
        self.places = [_Place() for _ in range(MAX_COMPILING)]
        self._free: asyncio.LifoQueue[_Place] = asyncio.LifoQueue()
        for place in self.places:
            self._free.put_nowait(place)
        self._of_client: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._threads = ThreadPoolExecutor(MAX_COMPILING, "dflash-trt grammar")

    def close(self) -> None:
        """Ends the processes; running and later compilations raise HttpError 503."""
        self._is_closed = True
        for place in self.places:
            if place.worker is not None:
                place.worker.kill()

    @property
    def num_active(self) -> int:
        """Number of grammars that are being compiled."""
        return MAX_COMPILING - self._free.qsize()

    async def prepare(self) -> Grammars:
        """Imports xgrammar and starts the first process, once; takes seconds, even if the caller is cancelled.

        Raises RequestError, or DFlashError where no process starts.
        """
        opened = self._opened
        if opened is None or (opened.done() and (opened.cancelled() or opened.exception() is not None)):
            opened = self._opened = asyncio.ensure_future(self._open())
        return await asyncio.shield(opened)

    async def compile(self, grammar: Grammar, client: str = "") -> Any:
        """Returns xgrammar's compiled grammar.

        Raises RequestError where it does not compile or takes too long, HttpError 429 where all places are taken,
        503 after `close`.
        """
        compiler = await self.prepare()  # no time limit
        if (known := compiler.known(grammar)) is not None:
            return known
        async with self._place(client) as place:
            if (known := compiler.known(grammar)) is not None:  # compiled by another request meanwhile
                return known
            if self._is_closed:
                raise shutting_down()
            worker = place.worker
            if worker is None or not worker.is_alive:
                worker = await self._start(place, compiler)
            try:
                async with asyncio.timeout(grammar_worker.COMPILE_SECONDS):
                    return await self._in_thread(_exchange, worker, compiler, grammar)
            except RequestError:
                raise
            except BaseException as error:  # too late, cancelled, or the process has ended
                worker.kill()
                place.worker = None
                if not isinstance(error, OSError | EOFError):
                    raise
                if self._is_closed:
                    raise shutting_down() from None
                limit = f"within {grammar_worker.COMPILE_SECONDS:g} s, found one that takes longer"
                found = (
                    limit if isinstance(error, TimeoutError) else "without ending the compiler, found one that ends it"
                )
                raise RequestError(f"{grammar.field}: expected a {grammar.kind} that compiles {found}") from None

    async def _open(self) -> Grammars:
        def open_compiler() -> tuple[Grammars, str]:
            compiler = self._new_compiler()
            return compiler, compiler.vocabulary

        compiler, vocabulary = await asyncio.to_thread(open_compiler)
        self.places[-1].worker = await _in_daemon_thread(lambda: GrammarWorker(vocabulary))
        return compiler

    @asynccontextmanager
    async def _place(self, client: str) -> AsyncGenerator[_Place, None]:
        share = self._of_client.get(client) or asyncio.Semaphore(MAX_COMPILING_PER_CLIENT)
        self._of_client[client] = share
        try:
            async with asyncio.timeout(PLACE_SECONDS):
                await share.acquire()
                try:
                    place = await self._free.get()
                except BaseException:
                    share.release()
                    raise
        except TimeoutError:
            raise overloaded(f"{self.num_active} grammars are being compiled") from None
        try:
            yield place
        finally:
            self._free.put_nowait(place)
            share.release()

    async def _start(self, place: _Place, compiler: Grammars) -> GrammarWorker:
        """Starts a process, and holds the place until it runs, even if the caller is cancelled."""
        start = asyncio.ensure_future(self._in_thread(GrammarWorker, compiler.vocabulary))
        try:
            return await asyncio.shield(start)
        finally:
            with suppress(DFlashError):
                place.worker = await start

    async def _in_thread(self, function: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _in_daemon_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Runs `function` on a thread that does not delay the end of the server."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()

    def work() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=work, name="dflash-trt grammar start", daemon=True).start()
    return asyncio.wrap_future(result)


def _exchange(worker: GrammarWorker, compiler: Grammars, grammar: Grammar) -> Any:
    return compiler.add(grammar, worker.compile(grammar))
