# SPDX-License-Identifier: Apache-2.0
"""Child processes that end, with all that they started, when the block ends or this process is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

STOP_SECONDS = 20
SUPERVISOR = Path(__file__).with_name("supervisor.py")


@contextmanager
def child_process(
    words: Sequence[str], log: int, *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program, by its path, that writes to the descriptor `log`; it and its descendants end with the block."""
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", str(SUPERVISOR), str(reader), str(STOP_SECONDS), *words]
    try:
        process = subprocess.Popen(  # noqa: S603  # our own words
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            pass_fds=(reader,),
        )  # fmt: skip
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    try:
        yield process
    finally:
        os.close(writer)  # the supervisor asks the program to stop, and ends what is left
        process.wait()
