# SPDX-License-Identifier: Apache-2.0
"""The log never waits for its reader, and has the errors of libraries."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from contextlib import suppress

from dflash_trt.runtime.server.telemetry.log import MAX_QUEUED_LINES, NonBlockingHandler


def test_errors_of_libraries_are_lines_of_the_log() -> None:
    """Python's own handler writes at once, to a reader that may not read."""
    code = "import logging; from dflash_trt.runtime.server.telemetry.log import set_up_logging; set_up_logging(); "
    code += "logging.getLogger('asyncio').error('an error'); logging.getLogger().handlers[0].flush()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"[-0-9]+ [:0-9]+ an error\n", run.stderr)


def test_an_unread_log_loses_lines() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):  # ends when the pipe is full
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    handler = NonBlockingHandler(writing)
    for i in range(2 * MAX_QUEUED_LINES):
        handler.handle(logging.LogRecord("x", logging.INFO, "x", 1, f"line {i} {'x' * 200}", None, None))
    assert handler.num_dropped > 0
    os.close(reading)  # the thread's write ends with an error, and it goes on
    handler.flush()
    assert handler.is_idle
