# SPDX-License-Identifier: Apache-2.0
"""Runs `dflash-trt` as a user does, and lists what it offers."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, TextIO
from unittest.mock import patch

import click

from dflash_trt.cli import _run, cli, output
from tests.waiting import PATIENCE


def run(*arguments: object, stdin: bytes | TextIO = b"") -> subprocess.CompletedProcess[str]:
    """`dflash-trt ARGUMENTS` as a process would end, in this one: no imports to wait for."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    argv = ["dflash-trt", *map(str, arguments)]
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8") if isinstance(stdin, bytes) else stdin
    with (
        patch.multiple(sys, argv=argv, stdin=given),
        patch.object(output, "has_document", False),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = _run()
    stdout, stderr = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(argv, code, stdout, stderr)


def run_process(*arguments: object, script: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """`dflash-trt ARGUMENTS` in a process of its own, or a script that calls main() with them."""
    start = ["-m", "dflash_trt"] if script is None else ["-c", script]
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def run_here(*arguments: object) -> Any:
    """Runs a command in this process without main(): errors are raised as they are."""
    return cli.main(list(map(str, arguments)), prog_name="dflash-trt", standalone_mode=False)


def surface() -> str:
    """Every command with its arguments and options, sorted: what users and scripts rely on."""
    return "".join(f"{line}\n" for line in sorted(_lines(cli, "dflash-trt")))


def _lines(command: click.Command, path: str) -> Iterator[str]:
    yield path
    for parameter in command.params:
        yield f"{path} {_describe(parameter)}"
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from _lines(child, f"{path} {name}")


def _describe(parameter: click.Parameter) -> str:
    if isinstance(parameter, click.Argument):
        name = parameter.human_readable_name.upper()
        return name if parameter.required else f"[{name}]"
    names = "/".join(parameter.opts)
    is_flag = isinstance(parameter, click.Option) and parameter.is_flag
    value = "" if is_flag else f" {parameter.metavar or parameter.type.name.upper()}"
    return f"{names}{value}" if parameter.required else f"[{names}{value}]"
