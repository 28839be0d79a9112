# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash_trt` is the `dflash-trt` command."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def main() -> NoReturn:
    """Entry point: Ctrl-C ends the process without a word until the commands are imported, which takes a moment."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_streams()
    raw = os.fdopen(sys.stderr.fileno(), "wb", closefd=False)
    sys.stderr = BestEffortStderr(raw, sys.stderr.encoding, errors="backslashreplace", line_buffering=True)
    from dflash_trt.cli import main as run

    run()


class BestEffortStderr(io.TextIOWrapper):
    """Standard error that loses text where none can be written, on a full disk or a closed pipe, and raises nothing."""

    def write(self, text: str) -> int:
        """Returns the length of `text`, written or not."""
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Writes what can be written."""
        with suppress(OSError):
            super().flush()


def _open_streams() -> None:
    """Opens the null device for closed standard streams, or a result that took a number would get what is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8", closefd=False))


if __name__ == "__main__":
    main()
