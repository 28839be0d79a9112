# SPDX-License-Identifier: Apache-2.0
"""Ends a Triton server whose model process has died, and a model process whose server has.

Of the first, Triton takes no notice while it streams (read and seen at 2.51): requests under way never end, later ones
fail, and the health checks go on saying ready. So clients get an error instead, and who runs the server restarts it.
Of the second, the process keeps its memory for ever, on GPUs too.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

GRACE_SECONDS = 5.0
"""For either's own way to end; the server's waits for the requests that never end."""


def start_guard() -> subprocess.Popen[bytes]:
    """Guards this process, whose parent is the server, until the guard is terminated."""
    watched = [str(os.getpid()), str(os.getppid())]
    return subprocess.Popen(  # noqa: S603 - our own module and two numbers
        [sys.executable, "-m", __name__, *watched], stdin=subprocess.DEVNULL
    )


def guard(model: int, server: int) -> None:
    """Returns when both processes have ended; ends the one that is left when the other has."""
    processes = os.pidfd_open(model), os.pidfd_open(server)  # numbers may be used again, these may not
    if processes[0] in _ended(processes, None):
        _end("model process", model, "server", server, processes[1])
    elif not _ended(processes[:1], GRACE_SECONDS):  # an orderly end comes to both, one after the other
        _end("server", server, "model process", model, processes[0])


def _end(dead: str, dead_id: int, left: str, left_id: int, process: int) -> None:
    if _ended((process,), 0):
        return
    print(f"dflash-trt: the {dead} {dead_id} has died; ending the {left} {left_id}", file=sys.stderr, flush=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, number)
        if _ended((process,), GRACE_SECONDS):
            return


def _ended(processes: tuple[int, ...], seconds: float | None) -> list[int]:
    """Those that have ended, once one has or the time is over."""
    return select.select(processes, [], [], seconds)[0]


if __name__ == "__main__":
    guard(*map(int, sys.argv[1:]))
