# SPDX-License-Identifier: Apache-2.0
"""The command line as others rely on it: a new option is a visible change of tests/golden/cli.txt."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest

from dflash_trt import __version__
from dflash_trt.cli import cli
from tests.cli.commands import run, surface
from tests.paths import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "cli.txt"


def test_surface_is_frozen() -> None:
    """After a wanted change: python -m tests.cli.test_surface"""
    assert surface() == GOLDEN.read_text()


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_help_of_every_command(name: str) -> None:
    command = cli.commands[name]
    with click.Context(command, info_name=name) as context:
        text = command.get_help(context)
    assert f"\n    dflash-trt {name} " in text or f"\n    dflash-trt {name}\n" in f"{text}\n"  # the example
    assert command.short_help is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help or parameter.show_default, parameter.name


def test_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """As README says; click writes the script, under the name that the command has."""
    monkeypatch.setenv("_DFLASH_TRT_COMPLETE", "bash_source")
    result = subprocess.run([f"{sys.prefix}/bin/dflash-trt"], capture_output=True, text=True, check=True)
    assert "_DFLASH_TRT_COMPLETE=bash_complete" in result.stdout


def test_help_names_every_command() -> None:
    result = run("--help")
    assert result.returncode == 0
    assert result.stderr == ""
    for name in cli.commands:
        assert f"\n  {name} " in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"dflash-trt, version {__version__}\n"


if __name__ == "__main__":
    GOLDEN.write_text(surface())
