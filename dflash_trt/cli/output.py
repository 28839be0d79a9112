# SPDX-License-Identifier: Apache-2.0
"""Data goes to stdout, as one JSON document or as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click
import msgspec


def print_json(command: str, document: dict[str, object]) -> None:
    """Prints one JSON document whose `schema` names the command and the document's version."""
    encoded = msgspec.json.encode({"schema": f"dflash-trt/{command}/1", **document})
    click.echo(msgspec.json.format(encoded, indent=2))


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table; columns after the first are numbers or short facts."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Text, because rich would take the brackets of 'dflash-trt[run]' for markup.
    table = Table(title=Text(title, style="bold"), title_justify="left", header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def human_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
