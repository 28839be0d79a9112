# SPDX-License-Identifier: Apache-2.0
"""Compiles grammars in a process with bounded memory, which can be killed: xgrammar cannot be interrupted."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.runtime.logits_processors import compile_grammar, read_vocabulary
from dflash_trt.runtime.server.http_error import HttpError

COMPILE_SECONDS = 10.0
"""Time limit for one grammar."""
COMPILE_BYTES = 2**30
"""Address space for one grammar: the regex a?a?..., 30,000 items long, took 4 GiB within 10 s."""
MAX_COMPILED_BYTES = 2**26
"""Largest compiled grammar, as xgrammar counts it."""
JOIN_SECONDS = 10.0
FORKSERVER_ENDED = 255
"""Exit code that multiprocessing reports when it cannot know."""
NICENESS = 10
"""Niceness of compilation: decoding goes first."""

CONTEXT = multiprocessing.get_context("forkserver")
"""Context whose server imports xgrammar and torch once, in 3 s; each process is a fork of it."""
CONTEXT.set_forkserver_preload(["xgrammar", __name__])


def start_forkserver() -> None:
    """Starts the server of CONTEXT unless it runs, without waiting for its imports; OSError where that fails."""
    with ThreadPoolExecutor(1) as thread:  # a child inherits the thread's niceness and signal mask
        thread.submit(_start_forkserver).result()


def _start_forkserver() -> None:
    resource_tracker.ensure_running()  # it would unblock the signal again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the server, which ends this
    if sys.platform == "linux":  # elsewhere it is the niceness of all threads
        os.nice(NICENESS)
    forkserver.ensure_running()


class GrammarWorker:
    """A process that compiles one grammar after another. Any thread may call `kill`, which also ends `compile`."""

    def __init__(self, vocabulary: str) -> None:
        """Starts the process with a `Grammars.vocabulary`; DFlashError where that fails."""
        try:
            start_forkserver()
            self._connection, theirs = CONTEXT.Pipe()
            arguments = (theirs, vocabulary, COMPILE_BYTES)
            self._process = CONTEXT.Process(target=_work, args=arguments, name="dflash-trt grammar", daemon=True)
            self._process.start()
        except (OSError, EOFError) as error:  # no memory, processes, open files or temporary directory
            raise DFlashError(f"expected a process that compiles grammars to start, found: {error!r}") from None
        theirs.close()

    def compile(self, grammar: Grammar) -> str:
        """The compiled grammar, serialised; RequestError for one that does not compile.

        EOFError, or OSError, where the process has ended; HttpError 503 where SIGTERM has ended it.
        """
        try:
            self._connection.send(grammar)
            answer = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(JOIN_SECONDS)
            if self._process.exitcode in (-signal.SIGTERM, FORKSERVER_ENDED):
                raise HttpError(503, "the process that compiles grammars was ended") from None
            raise
        if isinstance(answer, RequestError):
            raise answer
        return str(answer)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()


def _work(connection: Connection, vocabulary: str, num_bytes: int) -> None:
    """Compiles until the other end of `connection` is closed."""
    threading.Thread(target=_end_with_server, daemon=True).start()
    compiler = read_vocabulary(vocabulary)
    with suppress(EOFError, ConnectionError):
        while True:
            grammar = connection.recv()
            _limit_memory(num_bytes)
            connection.send(_compile(compiler, grammar, num_bytes))


def _compile(compiler: Any, grammar: Grammar, num_bytes: int) -> str | RequestError:
    try:
        compiled = compile_grammar(compiler, grammar)
        is_small = compiled.memory_size_bytes <= MAX_COMPILED_BYTES
        return str(compiled.serialize_json()) if is_small else _too_large(grammar, num_bytes)
    except MemoryError:
        return _too_large(grammar, num_bytes)
    except RequestError as error:
        return _too_large(grammar, num_bytes) if "std::bad_alloc" in error.message else error


def _too_large(grammar: Grammar, num_bytes: int) -> RequestError:
    """The error for a grammar beyond a memory limit."""
    limits = f"at most {num_bytes >> 20} MiB, and to at most {MAX_COMPILED_BYTES >> 20} MiB"
    return RequestError(
        f"{grammar.field}: expected a {grammar.kind} that compiles in {limits}, found one that takes more"
    )


def _limit_memory(num_bytes: int) -> None:
    """Limits the memory for the next grammar."""
    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + num_bytes, resource.RLIM_INFINITY))


def _end_with_server() -> None:
    server = multiprocessing.parent_process()
    assert server is not None
    wait([server.sentinel])
    os._exit(1)  # beside a compiler that cannot be interrupted
