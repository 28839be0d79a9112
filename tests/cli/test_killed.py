# SPDX-License-Identifier: Apache-2.0
"""Every command that writes, killed at many moments and run again: the old result or the new one, and no leftovers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.deployments import BUILD_CONFIGS
from tests.paths import FIXTURES

DRAFT, TARGET = str(FIXTURES / "tiny-qwen3-dflash"), str(FIXTURES / "tiny-qwen3")
PROMPTS = ["--prompts", str(FIXTURES / "prompts.jsonl"), "--max-tokens", "2", "--max-prompts"]
DEPLOYMENT = str(BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml")
# What stood there before, and what is written over it.
COMMANDS = {
    "build": (["build", DRAFT, "--target", TARGET, "--recipe", "fp8"], ["build", DRAFT, "--target", TARGET]),
    "build --recipe": (["build", DRAFT, "--target", TARGET], ["build", DRAFT, "--target", TARGET, "--recipe", "fp8"]),
    "quantize": (["quantize", DRAFT, "--recipe", "bf16"], ["quantize", DRAFT, "--recipe", "nvfp4"]),
    "capture": (
        ["capture", DRAFT, "--target", TARGET, *PROMPTS, "1"],
        ["capture", DRAFT, "--target", TARGET, *PROMPTS, "2"],
    ),
    "triton-repo": (["triton-repo", DEPLOYMENT, "--method", "none"], ["triton-repo", DEPLOYMENT]),
}
QUICK = ("build", "quantize")


def check(name: str, count: int, folder: Path, *, is_new: bool) -> None:
    output = folder / "out"
    before, after = ([*arguments, "-o", str(output)] for arguments in COMMANDS[name])
    forced = [*after, "--force"]
    plan = [str(output), None if is_new else before, forced, count]
    command = [sys.executable, "-m", "tests.cli.killed_commands"]
    result = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["steps"] > 10
    assert len(report["kills"]) == count
    for kill in report["kills"]:
        assert kill["killed"], kill
        assert kill["left"] in ("old", "new"), kill
        assert kill["again"], kill
        assert kill["names"] == (["out"] if is_new else ["kept", "out"]), kill


@pytest.mark.parametrize("name", QUICK)
def test_killed_while_it_replaces(name: str, tmp_path: Path) -> None:
    check(name, 5, tmp_path, is_new=False)


@pytest.mark.full
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_many_moments(name: str, is_new: bool, tmp_path: Path) -> None:
    check(name, 40, tmp_path, is_new=is_new)
