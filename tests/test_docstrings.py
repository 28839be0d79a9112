# SPDX-License-Identifier: Apache-2.0
"""A docstring makes sense on its own, as an editor shows it: no fragment that continues the line before."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

FRAGMENT = re.compile(r"\s*(?:(?:Of|That|Those|The same|And|Or|As|Its|Until|Also)\b|\.\.\.)")


def docstrings(file: Path) -> list[ast.Constant]:
    """Strings that are statements: docstrings, and those below fields and constants."""
    expressions = [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Expr)]
    return [value for value in expressions if isinstance(value, ast.Constant) and isinstance(value.value, str)]


@pytest.mark.parametrize("room", ["dflash_trt", "tests", "benchmarks", "tools"])
def test_docstrings_stand_alone(room: str) -> None:
    files = sorted((REPOSITORY / room).rglob("*.py"))
    found = [(file, text) for file in files for text in docstrings(file) if FRAGMENT.match(str(text.value))]
    assert [f"{file.relative_to(REPOSITORY)}:{text.lineno}: {text.value!r}" for file, text in found] == []
