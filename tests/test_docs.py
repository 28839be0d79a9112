# SPDX-License-Identifier: Apache-2.0
"""The Python examples of README and docs/runtime.md run as they stand, on a fixture engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engines import trained_engine
from tests.paths import FIXTURES, REPOSITORY

DOCUMENTS = ("README.md", "docs/runtime.md")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [(name, code) for name in DOCUMENTS for code in BLOCK.findall((REPOSITORY / name).read_text())]


@pytest.fixture(scope="module")
def substitutes() -> dict[str, Path]:
    """What stands in for the names in the examples: a fixture engine, and its target."""
    return {'"engine"': trained_engine("tiny-qwen3"), '"openai/gpt-oss-120b"': FIXTURES / "tiny-qwen3"}


@pytest.mark.parametrize(("document", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_example(document: str, code: str, substitutes: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for name, path in substitutes.items():
        assert name in code, f"{document}: an example without {name}"
        code = code.replace(name, repr(str(path)))
    exec(compile(code, document, "exec"), {})
    assert len(capsys.readouterr().out.strip()) > 10


def test_there_are_examples() -> None:
    assert [name for name, _ in EXAMPLES] == ["README.md", "docs/runtime.md", "docs/runtime.md"]
