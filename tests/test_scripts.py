# SPDX-License-Identifier: Apache-2.0
"""Every module of benchmarks/ and tools/ imports, and every command there answers --help."""

from __future__ import annotations

from importlib import import_module

import click
import pytest
from click.testing import CliRunner

from tests.paths import REPOSITORY

FILES = [file for room in ("benchmarks", "tools") for file in sorted((REPOSITORY / room).rglob("*.py"))]
NAMES = [".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in FILES]


@pytest.mark.parametrize("name", NAMES)
def test_starts(name: str) -> None:
    module = import_module(name)
    for command in vars(module).values():
        if isinstance(command, click.Command):
            result = CliRunner().invoke(command, ["--help"])
            assert (result.exit_code, result.output[:6]) == (0, "Usage:")
