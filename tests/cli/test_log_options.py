# SPDX-License-Identifier: Apache-2.0
"""-v, --quiet, --log-level and --log-format: what a command writes to stderr, and what it never hides."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from dflash_trt.cli import cli, leaves
from dflash_trt.cli.log_options import OURS
from tests.cli.commands import run
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.waiting import PATIENCE

BUILD = ("build", FIXTURES / "tiny-qwen3-dflash", "--target", FIXTURES / "tiny-qwen3")


def test_every_command_has_them() -> None:
    for command in leaves(cli):
        assert {"verbose", "quiet", "log_level", "log_format"} <= {each.name for each in command.params}, command.name


def test_quiet_leaves_results_and_errors(tmp_path: Path) -> None:
    loud, quiet = run(*BUILD, "-o", tmp_path / "a"), run(*BUILD, "-o", tmp_path / "b", "--quiet")
    assert "next: dflash-trt verify" in loud.stderr
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, f"{tmp_path / 'b'}\n", "")
    refused = run("inspect", tmp_path / "nowhere", "--quiet")
    assert refused.returncode == 1
    assert "error: " in refused.stderr
    assert "hint: " in refused.stderr


def test_json_is_one_object_a_line(tmp_path: Path) -> None:
    for words in ([*BUILD, "-o", tmp_path / "a"], ["inspect", "nowhere"], ["inspect", "nowhere", "--quiet"]):
        entries = list(map(json.loads, run(*words, "--log-format", "json").stderr.splitlines()))
        assert all(entry.keys() == {"time", "level", "logger", "message"} for entry in entries)
        assert [entry["level"] for entry in entries] == ["info", "info"] if words[0] == "build" else ["error", "info"]


@pytest.mark.parametrize(
    ("words", "level"), [(["-v"], "INFO"), (["-vv"], "DEBUG"), (["--log-level", "error"], "ERROR"), ([], "NOTSET")]
)
def test_levels(words: list[str], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    module = sys.modules["dflash_trt.cli.inspect"]
    monkeypatch.setattr(module, "read_draft", lambda *_: found.append(logging.getLevelName(OURS.level)) or 1 / 0)
    run("inspect", FIXTURES / "tiny-qwen3-dflash", *words)
    assert found == [level]
    assert OURS.level == logging.NOTSET


@pytest.mark.full
@pytest.mark.parametrize("level", ["info", "debug"])
def test_probes_are_logged_for_debugging_only(level: str) -> None:
    engine, target = trained_engine("tiny-qwen3"), FIXTURES / "tiny-qwen3"
    words = ["serve", engine, "--target", target, "--port", "0", "--log-format", "json", "--log-level", level]
    command = [sys.executable, "-m", "dflash_trt", *map(str, words)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(line for line in map(message, server.stderr) if line.startswith("serving ")).rpartition(" ")[2]
        for path in ("/health", "/version"):
            with urlopen(url + path, timeout=PATIENCE) as answer:
                assert answer.status == 200
        server.terminate()
        messages = [message(line) for line in server.stderr]
    assert [line for line in messages if " GET /version 200 " in line]
    assert bool([line for line in messages if " GET /health 200 " in line]) == (level == "debug")


def message(line: str) -> str:
    return str(json.loads(line)["message"])
