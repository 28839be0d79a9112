# SPDX-License-Identifier: Apache-2.0
"""Progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LINE_SECONDS = 30.0


@contextmanager
def progress_line(text: str) -> Iterator[None]:
    """One line on stderr while something takes long, where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def progress_bar(total: int, label: str) -> Iterator[Callable[[], None]]:
    """A bar on stderr with the time left, else a line now and then; yields what moves it on by one."""
    if not sys.stderr.isatty():
        yield _progress_lines(total, label)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)


def _progress_lines(total: int, label: str) -> Callable[[], None]:
    """Counter that prints a line every LINE_SECONDS: hours of silence in a log look like a hang."""
    done, said = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, said
        done += 1
        if (now := time.monotonic()) - said >= LINE_SECONDS:
            said = now
            print(f"{label}: {done} of {total}", file=sys.stderr)

    return advance
