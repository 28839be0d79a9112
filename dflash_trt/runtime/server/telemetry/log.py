# SPDX-License-Identifier: Apache-2.0
"""The server's log on stderr; lines are dropped while it is not read, and the server goes on."""

from __future__ import annotations

import logging
import os
import queue
import threading
from contextlib import suppress

from dflash_trt.files.json_log import JsonFormatter

MAX_QUEUED_LINES = 1000
FLUSH_SECONDS = 1.0
STDERR = 2
log = logging.getLogger("dflash_trt.runtime.server")


class NonBlockingHandler(logging.Handler):
    """Writes lines to a file descriptor on a thread of its own, and drops them while that is not read."""

    def __init__(self, descriptor: int = STDERR) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(MAX_QUEUED_LINES)
        self.num_dropped = 0
        """Lines dropped since the last one that was written."""
        self._is_idle = threading.Event()
        self._is_idle.set()
        threading.Thread(target=self._write, name="dflash-trt log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        self._is_idle.clear()
        try:
            self._lines.put_nowait(self.format(record) + "\n")
        except queue.Full:
            self.num_dropped += 1

    @property
    def is_idle(self) -> bool:
        """Whether every line is written or dropped."""
        return self._is_idle.is_set()

    def flush(self) -> None:
        """Waits until the queue is written, for a moment at most."""
        self._is_idle.wait(FLUSH_SECONDS)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            if self.num_dropped:
                line = f"{self.num_dropped} log lines were dropped\n{line}"
                self.num_dropped = 0
            with suppress(OSError):  # a full disk, a closed pipe
                os.write(self._descriptor, line.encode(errors="backslashreplace"))
            if self._lines.empty():
                self._is_idle.set()


def set_up_logging() -> None:
    """The access log, what GPUs record, our warnings and libraries' errors on stderr, with the time.

    A level of the logger `dflash_trt` that is set already stays, and so does JSON as the format.
    """
    handler, chosen = NonBlockingHandler(), logging.getLogger("dflash_trt").level
    formatters = [each.formatter for each in logging.getLogger().handlers]
    text = logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(next((each for each in formatters if isinstance(each, JsonFormatter)), text))
    logging.basicConfig(level=logging.ERROR, handlers=[handler], force=True)
    levels = {"dflash_trt": chosen or logging.WARNING, "dflash_trt.runtime": chosen or logging.INFO}
    levels["uvicorn.error"] = logging.ERROR
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
