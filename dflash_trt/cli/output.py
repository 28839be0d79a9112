# SPDX-License-Identifier: Apache-2.0
"""Data goes to stdout, as one JSON document or as tables."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.errors import printable
from dflash_trt.files.human_sizes import human_bytes as human_bytes

if TYPE_CHECKING:
    from dflash_trt.observe.pages.page_templates import Table

NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)? ?(%|x|s|ms|[KMGT]i?B|B)?")
NO_NUMBER = ("", "-", "?", "any")  # in a column of numbers
PIPE_WIDTH = 10_000
BORDER = 3  # of a column: two spaces and a line
NARROW_TEXT = 8  # a column of text is folded down to this
has_document = False
"""Whether this process has printed its one JSON document."""


def print_json(command: str, document: dict[str, object]) -> None:
    """Prints one JSON document whose `schema` names the command and the document's version."""
    encoded = msgspec.json.encode({"schema": f"dflash-trt/{command}/1", **document})
    global has_document
    click.echo(_escaped(msgspec.json.format(encoded, indent=2).decode()))
    has_document = True


def _escaped(document: str) -> str:
    """The same JSON, with what a terminal would obey (C1 codes, text direction) written as JSON's escapes."""
    if document.replace("\n", "").isprintable():
        return document
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in document)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table, columns of numbers right-aligned; text is folded to a terminal's width, in a pipe never.

    A number is never folded: two halves of one would be read as two. A terminal too narrow for that folds whole lines.
    Control characters, which a checkpoint's or a configuration's names may hold, are shown as escapes.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, because rich would take the brackets of 'dflash-trt[run]' for markup.
    table = Table(title=Text(printable(title), style="bold"), title_justify="left", header_style="dim")
    cells = [tuple(map(printable, row)) for row in rows]
    is_measured = sys.stdout.isatty() or "COLUMNS" in os.environ
    needed = 1
    for index, column in enumerate(columns):
        values = [row[index] for row in cells if index < len(row)]
        width = max(map(len, values), default=0)
        if _are_numbers(values):
            header = _as_narrow_as(column, width) if is_measured else column
            table.add_column(header, no_wrap=True, justify="right")
            width = max(width, *map(len, header.split("\n")))
        else:
            table.add_column(column, overflow="fold")
            width = min(max(width, len(column)), NARROW_TEXT)
        needed += width + BORDER
    for row in cells:
        table.add_row(*map(Text, row))
    console = Console(width=None if is_measured else PIPE_WIDTH)
    console.width = max(console.width, needed)
    console.print(table)


def print_tables(tables: Iterable[Table]) -> None:
    for table in tables:
        print_table(table.title, table.columns, table.rows)


def _as_narrow_as(header: str, width: int) -> str:
    """A header on as many lines as it takes to be no wider than its column's numbers; words stay whole."""
    return textwrap.fill(header, max(1, width), break_long_words=False, break_on_hyphens=False)


def _are_numbers(values: Sequence[str]) -> bool:
    """Whether a column holds numbers, with or without a unit, and nothing else."""
    shown = [value for value in values if value not in NO_NUMBER]
    return bool(shown) and all(NUMBER.fullmatch(value) for value in shown)


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
    """A bar on stderr with the time left, where that is a terminal; yields what moves it on by one."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
