# SPDX-License-Identifier: Apache-2.0
"""A decoder on a thread of its own: requests come in from any thread, progress goes out by callback."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from dflash_trt.api.completion import FinishReason
from dflash_trt.errors import EngineError
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.request import Request

Command = tuple[Callable[[Request], None], Request]


class DecoderThread:
    """Steps its decoder while there are requests, and sleeps while there are none."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self.error: Exception | None = None
        """What ended it."""
        self._thread = threading.Thread(target=self._run, name="dflash-trt decoder", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether it takes requests."""
        return not self._is_closed

    def submit(self, request: Request) -> None:
        """Queues a request; EngineError when the thread has ended or failed."""
        self._send(self._decoder.add, request)

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step; one that has ended stays as it is."""
        if request.finished is None:
            with suppress(EngineError):  # a thread that ends has ended it, or is about to
                self._send(self._decoder.cancel, request)

    def close(self) -> None:
        """Cancels what is left and ends the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # there, when the last reference goes while it reports
            self._thread.join()

    def _send(self, command: Callable[[Request], None], request: Request) -> None:
        with self._changed:
            if self._is_closed:
                raise EngineError("expected an open LLM, found a closed one") from self.error
            self._commands.append((command, request))
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._execute():
                self._decoder.step()
        except Exception as error:  # whatever it is, those who wait must hear of it
            self.error = error
        with self._changed:
            self._is_closed = True
        self._end_all()

    def _execute(self) -> bool:
        """Carries out what was sent, waiting for it where there is nothing else to do; False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or self._is_closed or not self._decoder.is_idle)
            commands = list(self._commands)
            is_open = not self._is_closed
        for command, request in commands:
            command(request)
            self._commands.popleft()  # not before: `_end_all` must see those behind one that fails
        return is_open

    def _end_all(self) -> None:
        """Ends every request that is left, so that nobody waits for ever."""
        left = [*self._decoder.running.values(), *self._decoder.waiting, *(request for _, request in self._commands)]
        for request in left:
            if request.finished is None:
                request.error = self.error
                request.finish(FinishReason.CANCELLED)
                request.report()
