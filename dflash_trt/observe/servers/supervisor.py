# SPDX-License-Identifier: Apache-2.0
"""Runs a program and ends it with all its descendants: python supervisor.py DESCRIPTOR STOP_SECONDS PROGRAM WORD...

DESCRIPTOR is the reading end of a pipe without data: it ends when the process that started this one closes it or dies
for any reason. Descendants whose own parent dies become children of this process (a subreaper, linux/prctl.h), so that
none is lost. It is run by its path, and imports only the standard library.
"""

import ctypes
import os
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
BLOCKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that go to the whole group: the program answers them, and this process waits for it."""
POLL_SECONDS = 0.02


def start(words: list[str]) -> int:
    """Process id of the program, which dies with this process."""
    process = os.fork()
    if process:
        return process
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
        os.execvp(words[0], words)  # noqa: S606  # no shell is wanted
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
    os._exit(127)


def children() -> list[int]:
    """Direct children, orphaned descendants among them."""
    return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def reap(program: int) -> int | None:
    """Collects what has ended; the wait status of `program`, where it is among that."""
    status = None
    while True:
        try:
            process, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if process == 0:
            return status
        if process == program:
            status = code


def end_descendants() -> None:
    """Kills until there is none: the children of one that is killed become this process's own."""
    while left := children():
        for process in left:
            os.kill(process, signal.SIGKILL)
        reap(0)
        time.sleep(POLL_SECONDS)


def main() -> None:
    """Exits as the program does."""
    pipe, patience, words = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    os.set_inheritable(pipe, False)
    program = start(words)
    deadline = float("inf")
    while (status := reap(program)) is None:
        if time.monotonic() > deadline:
            os.kill(program, signal.SIGKILL)
        elif deadline < float("inf"):
            time.sleep(POLL_SECONDS)
        elif select.select([pipe], [], [], POLL_SECONDS)[0]:
            os.killpg(0, signal.SIGTERM)
            deadline = time.monotonic() + patience
    end_descendants()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
