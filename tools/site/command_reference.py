# SPDX-License-Identifier: Apache-2.0
"""The page of all commands and options, made of what `--help` prints."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import click

from dflash_trt.cli import cli

PROGRAM = "dflash-trt"
VERBATIM = re.compile(r"^\x08\n(.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)


class Recorder(click.HelpFormatter):
    """Collects the sections of a help text as Markdown."""

    def __init__(self, anchors: dict[str, str]) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._anchors = anchors

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """A group of options or commands, under its name."""
        self.parts.append(f"**{name}**")
        yield

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Adds one definition for each option or command."""
        for term, text in rows:
            name = f"[`{term}`](#{self._anchors[term]})" if term in self._anchors else f"`{term}`"
            self.parts.append(f"{name}\n:   {_escaped(text) or '&nbsp;'}")


def command_reference() -> str:
    """All commands with their usage, description and options."""
    with click.Context(cli, info_name=PROGRAM, **cli.context_settings) as context:
        parts = ["# Commands", *_description(cli), *_sections(cli, context)]
        for name in cli.list_commands(context):
            command = cli.get_command(context, name)
            if command is not None and not command.hidden:
                parts += _command(command, name, context, 2)
    return "\n\n".join(parts) + "\n"


def _command(command: click.Command, name: str, parent: click.Context, level: int) -> Iterator[str]:
    with click.Context(command, info_name=name, parent=parent) as context:
        yield f"{'#' * level} {context.command_path} {{ #{_anchor(context.command_path)} }}"
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        yield f"```text\n{usage}\n```"
        yield from _description(command)
        yield from _sections(command, context)
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                if (found := command.get_command(context, inner)) is not None:
                    yield from _command(found, inner, context, level + 1)


def _anchor(path: str) -> str:
    """'bench-run' for `dflash-trt bench run`."""
    return path.removeprefix(PROGRAM).strip().replace(" ", "-")


def _description(command: click.Command) -> Iterator[str]:
    """Paragraphs of a command's help; those after a backspace character are code."""
    for given in (command.help, command.epilog):
        text, rest = inspect.cleandoc(given or ""), 0
        for block in VERBATIM.finditer(text):
            yield from _paragraphs(text[rest : block.start()])
            yield _code(block[1])
            rest = block.end()
        yield from _paragraphs(text[rest:])


def _code(block: str) -> str:
    """A heading that ends in a colon, and the indented lines below it as code."""
    head, _, lines = block.partition("\n")
    if not head.endswith(":"):
        head, lines = "", block
    code = "\n".join(line.removeprefix("  ") for line in lines.splitlines())
    return f"{_escaped(head)}\n\n```sh\n{code}\n```".strip()


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if paragraph:
            yield _escaped(" ".join(paragraph.split()))


def _sections(command: click.Command, context: click.Context) -> list[str]:
    """Options, without --help, and a group's commands."""
    commands = command.list_commands(context) if isinstance(command, click.Group) else []
    recorder = Recorder({name: _anchor(f"{context.command_path} {name}") for name in commands})
    command.format_options(context, recorder)
    parts = [part for part in recorder.parts if not re.match(r"\[?`-h, --help`", part)]
    titles = {index for index, part in enumerate(parts) if part.startswith("**")}
    return [part for index, part in enumerate(parts) if index not in titles or index + 1 not in titles | {len(parts)}]


def _escaped(text: str) -> str:
    """`text` for Markdown, in which only code between backquotes keeps its meaning."""
    pieces = re.split(r"(`[^`]+`)", text)
    plain = (re.sub(r"([\\*_\[\]])", r"\\\1", piece).replace("<", "&lt;") for piece in pieces)
    return "".join(piece if piece.startswith("`") else escaped for piece, escaped in zip(pieces, plain, strict=True))
