# SPDX-License-Identifier: Apache-2.0
"""Child processes that end with their parent: when the block ends, and where this process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

STOP_SECONDS = 20
# PR_SET_PDEATHSIG (linux/prctl.h) outlives exec; a process whose parent has ended before it was set does not start.
LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@contextmanager
def child_process(
    words: Sequence[str], log: int, *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program, by its path, that writes to the descriptor `log`; it and its children end with the block."""
    command = [sys.executable, "-c", LAUNCHER, str(os.getpid()), *words]
    process = subprocess.Popen(  # noqa: S603  # our own words
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
