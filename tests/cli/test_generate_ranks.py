# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt generate --tp N` under torchrun and mpiexec, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines import trained_engine
from tests.paths import FIXTURES, REPOSITORY

TARGET = FIXTURES / "tiny-gpt-oss"
SCRIPTS = f"{sys.prefix}/bin"


def answers(command: list[str], *options: str) -> list[dict[str, Any]]:
    arguments = [
        "generate",
        str(trained_engine("tiny-gpt-oss")),
        "--target",
        str(TARGET),
        "--max-tokens",
        "24",
        "--json",
        *options,
    ]
    result = subprocess.run(
        [*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=180, check=False
    )
    assert result.returncode == 0, result.stderr
    requests: list[dict[str, Any]] = json.loads(result.stdout)["requests"]
    return requests


def write_prompts(file: Path) -> str:
    file.write_text(json.dumps([list(range(40, 40 + length)) for length in (5, 90, 300)]))
    return str(file)


@pytest.mark.full
@pytest.mark.parametrize(("launcher", "num_ranks"), [("torchrun", 2), ("mpiexec", 8)])
def test_ranks_give_the_tokens_of_one(tmp_path: Path, launcher: str, num_ranks: int) -> None:
    options = ("--token-ids", write_prompts(tmp_path / "prompts.json"), "--batch-size", "2", "--draft-length", "7")
    command = {
        "torchrun": [f"{SCRIPTS}/torchrun", "--nproc-per-node", str(num_ranks), "-m", "dflash_trt"],
        "mpiexec": [f"{SCRIPTS}/mpiexec", "-n", str(num_ranks), sys.executable, "-m", "dflash_trt"],
    }[launcher]
    one = answers([sys.executable, "-m", "dflash_trt"], *options)
    many = answers(command, *options, "--tp", str(num_ranks), "--baseline")
    assert [request["token_ids"] for request in many] == [request["token_ids"] for request in one]
    assert [request["steps"] for request in many] == [request["steps"] for request in one]
    assert all(request["identical"] for request in many)
