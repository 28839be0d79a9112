# SPDX-License-Identifier: Apache-2.0
"""Data goes to stdout, as one JSON document or as tables."""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.errors import human_bytes as human_bytes
from dflash_trt.errors import printable

if TYPE_CHECKING:
    from dflash_trt.observe.pages.page_templates import Table

NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)? ?(%|x|s|ms|[KMGT]i?B|B)?")
NO_NUMBER = ("", "-", "?", "any")  # in a column of numbers
PIPE_WIDTH = 10_000
BORDER = 3  # width of a column's border: two spaces and a line
SPACES = "  "  # border overhead of a column without lines
has_document = False
"""Whether this process has printed its one JSON document."""


def print_json(command: str, document: dict[str, object]) -> None:
    """Prints one JSON document whose `schema` names the command and the document's version."""
    encoded = msgspec.json.encode({"schema": f"dflash-trt/{command}/1", **document})
    global has_document
    click.echo(_escaped(msgspec.json.format(encoded, indent=2).decode()))
    has_document = True


def print_written(
    command: str, output: Path, summary: str, document: dict[str, object], *, next_step: str = "", as_json: bool
) -> None:
    """Reports a written result: its path or a JSON document on stdout; a summary and the next command on stderr."""
    click.echo(summary, err=True)
    if next_step:
        click.echo(f"next: {next_step}", err=True)
    if as_json:
        print_json(command, {"output": str(output), **document})
    else:
        click.echo(output)


@contextmanager
def resumable(state: Path) -> Iterator[None]:
    """On Ctrl-C, says that the same command resumes from `state`, if it exists."""
    try:
        yield
    except KeyboardInterrupt:
        if state.exists():
            click.echo(f"interrupted: the same command continues from {state}", err=True)
        raise


def _escaped(document: str) -> str:
    """Writes what a terminal would obey (C1 codes, text direction) as JSON's escapes."""
    if document.replace("\n", "").isprintable():
        return document
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in document)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table, columns of numbers right-aligned, no wider than the terminal; in a pipe nothing is folded.

    Cells are folded at spaces only, so that no name or number is cut. A table that is still too wide is printed without
    lines, or row by row. Control characters in names of checkpoints and configurations are shown as escapes.
    """
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, because rich would take the brackets of 'dflash-trt[run]' for markup.
    heading = Text(printable(title), style="bold")
    cells = [tuple(map(printable, row)) for row in rows]
    console = Console()
    if not (is_measured := sys.stdout.isatty() or "COLUMNS" in os.environ):
        console.width = PIPE_WIDTH
    table = Table(title=heading, title_justify="left", header_style="dim")
    natural, least = [], []
    for index, column in enumerate(columns):
        values = [row[index] for row in cells if index < len(row)]
        are_numbers = _are_numbers(values)
        words = values if are_numbers else [word for value in values for word in value.split()]
        least.append(max(map(cell_len, [*words, *column.split()]), default=0))
        header = _as_narrow_as(column, least[-1]) if are_numbers and is_measured else column
        lines = [line for text in (*values, header) for line in text.split("\n")]
        natural.append(least[-1] if are_numbers and is_measured else max(map(cell_len, lines)))
        table.add_column(header, no_wrap=are_numbers, justify="right" if are_numbers else "left")
    widths = _column_widths(natural, least, console.width - BORDER * len(columns) - 1)
    if widths is None:
        table.box = None
        widths = _column_widths(natural, least, console.width - len(SPACES) * len(columns))
    if widths is None:
        console.print(heading)
        _print_blocks(columns, cells, console.width)
        return
    for column_of_table, width in zip(table.columns, widths, strict=True):
        column_of_table.width = width
    for row in cells:
        table.add_row(*map(Text, row))
    console.print(table)


def _column_widths(natural: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Widths between `least` and `natural` that fill `room` where they must; None where even the least do not fit."""
    widths, spare = list(least), room - sum(least)
    if spare < 0:
        return None
    order = sorted(range(len(widths)), key=lambda index: natural[index] - least[index])
    for place, index in enumerate(order):
        added = min(natural[index] - least[index], spare // (len(order) - place))
        widths[index] += added
        spare -= added
    return widths


def _print_blocks(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> None:
    """Prints each row as its first cell (the first two if that is ambiguous), with the named others below it.

    In a table of two columns the second has no name, and stands beside the first where there is room.
    """
    num_first = 1 if len({first for first, *_ in rows}) == len(rows) else 2
    for row in rows:
        names = columns if len(columns) > 2 else ("", "")
        pairs = [f"{name} {cell}".strip() for name, cell in zip(names, row, strict=False) if cell]
        first = row[0] if num_first == 1 else ", ".join(pairs[:num_first])
        others = "; ".join(pairs[num_first:])
        if len(columns) == 2 and len(first) + len(others) + 2 <= width:
            click.echo(f"{first}  {others}".rstrip())
            continue
        lines = textwrap.wrap(others, max(1, width - 2), break_long_words=False, break_on_hyphens=False)
        click.echo("\n  ".join([first, *lines]))


def number_text(number: float | None) -> str:
    """A count as it is, a mean to two places, '-' for none."""
    return "-" if number is None else f"{number:.2f}" if isinstance(number, float) else str(number)


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
