# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash_trt` is the `dflash-trt` command."""

from __future__ import annotations

import signal
from typing import NoReturn


def main() -> NoReturn:
    """Entry point: Ctrl-C ends the process without a word until the commands are imported, which takes a moment."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from dflash_trt.cli import main as run

    run()


if __name__ == "__main__":
    main()
