# SPDX-License-Identifier: Apache-2.0
"""The thread that steps a decoder."""

from __future__ import annotations

import threading
import time
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

    def __init__(self, decoder: Decoder, on_end: Callable[[], None]) -> None:
        self._decoder = decoder
        self._on_end = on_end
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()
        self.is_open = True
        """Whether it takes requests."""
        self.error: Exception | None = None
        """Exception that ended it."""
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="dflash-trt decoder", daemon=True)
        self._thread.start()

    @property
    def step_seconds(self) -> float:
        """Seconds since the current step began; 0 while no request runs."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, request: Request) -> None:
        """Queues a request; EngineError when the thread has ended or failed."""
        self._send(self._decoder.add, request)

    def cancel(self, request: Request) -> None:
        """Ends a request before the next step; one that has ended stays as it is."""
        if request.finished is None:
            with suppress(EngineError):  # an ending thread ends all its requests
                self._send(self._decoder.cancel, request)

    def close(self) -> None:
        """Cancels all requests and ends the thread."""
        with self._changed:
            self.is_open = False
            self._changed.notify()
        if threading.current_thread() is not self._thread:  # dropped with the last reference to a report
            self._thread.join()

    def _send(self, command: Callable[[Request], None], request: Request) -> None:
        with self._changed:
            if not self.is_open:
                raise EngineError("this LLM is closed") from self.error
            self._commands.append((command, request))
            self._changed.notify()

    def _run(self) -> None:
        try:
            while self._execute():
                self._decoder.step()
        except Exception as error:  # any: waiting callers must get it
            self.error = error
        with self._changed:
            self.is_open = False
        self._end_all()
        self._decoder.close()
        self._on_end()

    def _execute(self) -> bool:
        """Executes queued commands, waiting for one if the decoder is idle; False when closed."""
        self._step_began = None
        with self._changed:
            self._changed.wait_for(lambda: self._commands or not self.is_open or not self._decoder.is_idle)
            self._step_began = time.monotonic()
            commands, is_open = list(self._commands), self.is_open
        for command, request in commands:
            command(request)
            self._commands.popleft()  # afterwards, so that `_end_all` sees the commands after one that fails
        return is_open

    def _end_all(self) -> None:
        """Ends all remaining requests, so that no caller waits for ever."""
        left = [*self._decoder.running.values(), *self._decoder.waiting, *(request for _, request in self._commands)]
        for request in left:
            if request.finished is None:
                request.error = self.error
                request.finish(FinishReason.CANCELLED)
                request.report()
