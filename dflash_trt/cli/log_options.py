# SPDX-License-Identifier: Apache-2.0
"""-v, --quiet, --log-level and --log-format, which every command takes, and what they do to stderr."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TextIO, cast

import click

from dflash_trt.files.json_log import JsonFormatter

LEVELS = ("debug", "info", "warning", "error")
OPTIONS = (
    click.option("-v", "--verbose", count=True, help="Log what is loaded and chosen; -vv: more."),
    click.option("--quiet", is_flag=True, help="Only results and errors: no progress, no notes, no warnings."),
    click.option("--log-level", type=click.Choice(LEVELS), help="Least level of the log.  [default: warning]"),
    click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True,
                 help="json: every line of stderr is an object, for log collectors."),
)  # fmt: skip
PLAIN, LONG = "%(message)s", "%(asctime)s %(levelname)s %(name)s: %(message)s"
OURS = logging.getLogger("dflash_trt")
TALK = logging.getLogger("dflash_trt.cli")


class Silence(io.TextIOBase):
    """Text for stderr that is not shown."""

    def write(self, text: str) -> int:
        """Drops the text."""
        return len(text)


class LogLines(io.TextIOBase):
    """Text for stderr as log records, one a line."""

    def __init__(self) -> None:
        self._begun = ""

    def write(self, text: str) -> int:
        """Logs the lines that are complete."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in filter(str.strip, lines):
            TALK.log(logging.ERROR if line.startswith(("error: ", "Error: ")) else logging.INFO, line)
        return len(text)


@contextmanager
def restored_streams() -> Iterator[None]:
    """Undoes the options when a command has ended, for callers that run another one."""
    stderr, handlers, level = sys.stderr, logging.getLogger().handlers[:], OURS.level
    try:
        yield
    finally:
        sys.stderr = stderr
        logging.getLogger().handlers[:] = handlers
        OURS.setLevel(level)


def add_log_options(command: click.Command) -> None:
    """Adds the options to a command."""
    run = command.callback
    assert run is not None
    for option in OPTIONS:
        option(command)

    @wraps(run)
    def logged(*args: Any, **settings: Any) -> Any:
        _set_up(*(settings.pop(name) for name in ("verbose", "quiet", "log_level", "log_format")))
        return run(*args, **settings)

    command.callback = logged


def _set_up(verbose: int, quiet: bool, level: str | None, form: str) -> None:
    """Applies the options to this process."""
    level = level or ("error" if quiet else (None, "info", "debug")[min(verbose, 2)])
    is_json, stderr = form == "json", sys.stderr
    if level is not None:
        OURS.setLevel(level.upper())
    if level is not None or is_json:
        handler = logging.StreamHandler(stderr)
        handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(LONG if verbose else PLAIN))
        logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    if is_json:
        TALK.setLevel(logging.INFO)
    lines: Any = LogLines() if is_json else stderr
    sys.stderr = lines if not quiet else cast("TextIO", Silence())
    click.get_current_context().call_on_close(lambda: setattr(sys, "stderr", lines))  # for errors, reported afterwards
