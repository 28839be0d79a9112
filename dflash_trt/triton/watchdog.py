# SPDX-License-Identifier: Apache-2.0
"""A watchdog process: ends a Triton server whose model process has died, and a model process whose server has.

Triton 2.51 does not notice a model process that dies while it streams: its requests never end, later ones fail, and
/v2/health/ready stays 200. Once the server has ended, clients get an error and its supervisor restarts it. A model
process without its server would keep its memory, on GPUs too.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

GRACE_SECONDS = 5.0
"""Time to exit in order, before SIGKILL; a server waits for requests that never end."""


def start_watchdog() -> subprocess.Popen[bytes]:
    """Watches this process and its parent, the server, until it is terminated."""
    pids = [str(os.getpid()), str(os.getppid())]
    return subprocess.Popen(  # noqa: S603 - our own module and two pids
        [sys.executable, "-m", __name__, *pids], stdin=subprocess.DEVNULL
    )


def watch(model_pid: int, server_pid: int) -> None:
    """Returns when both processes have exited; terminates the survivor when one has."""
    model, server = os.pidfd_open(model_pid), os.pidfd_open(server_pid)  # a pid may be reused, a pidfd is not
    if model in _exited((model, server), None):
        _terminate("model process", model_pid, "server", server_pid, server)
    elif not _exited((model,), GRACE_SECONDS):  # in an orderly shutdown the model process follows the server
        _terminate("server", server_pid, "model process", model_pid, model)


def _terminate(dead: str, dead_pid: int, survivor: str, survivor_pid: int, pidfd: int) -> None:
    if _exited((pidfd,), 0):
        return
    print(f"dflash-trt: {dead} {dead_pid} has died; terminating {survivor} {survivor_pid}", file=sys.stderr, flush=True)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, number)
        if _exited((pidfd,), GRACE_SECONDS):
            return


def _exited(pidfds: tuple[int, ...], timeout_seconds: float | None) -> list[int]:
    """Wait until one has exited or the time is over; return all that have."""
    return select.select(pidfds, [], [], timeout_seconds)[0]


if __name__ == "__main__":
    watch(*map(int, sys.argv[1:]))
