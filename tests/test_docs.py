# SPDX-License-Identifier: Apache-2.0
"""The Python blocks of README and docs/runtime.md and the programs in docs/examples run, on the fixtures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


def example(name: str, *arguments: object, cwd: Path) -> str:
    """The output of a program in docs/examples."""
    program = REPOSITORY / "docs" / "examples" / name
    command = [sys.executable if program.suffix == ".py" else "bash", program, *arguments]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_build_and_generate(tmp_path: Path) -> None:
    assert re.findall(r"# tau (\S+):", example("build_and_generate.py", cwd=tmp_path))[1] > "1.00"


def test_verify_with_a_loss_budget(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join((FIXTURES / "prompts.jsonl").read_text().splitlines(keepends=True)[:3]))
    pair = (FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3", prompts)
    assert "tau loss" in example("verify_with_a_loss_budget.sh", *pair, "60%", cwd=tmp_path)


def test_deploy(tmp_path: Path) -> None:
    assert "serve.yaml: no findings" in example("deploy.sh", cwd=tmp_path)
    written = {path.name for path in (tmp_path / "deployment").rglob("*")}
    assert {"serve.yaml", "kubernetes.yaml", "config.pbtxt"} <= written
