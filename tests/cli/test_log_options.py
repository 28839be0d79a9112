# SPDX-License-Identifier: Apache-2.0
"""-v, --quiet, --log-level and --log-format: what a command writes to stderr, and what it never hides."""

import json
import logging
import subprocess
import sys
from pathlib import Path

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


SERVE = """
import http.client, sys, threading
from dflash_trt.cli.serve import _say
import dflash_trt.cli.serve as serve
def ask(line):
    _say(line)
    if line.startswith("serving "):
        threading.Thread(target=asked, args=(int(line.rpartition(":")[2]),)).start()
def asked(port):
    import os, signal
    for path in ("/health", "/version"):
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", path)
        connection.getresponse().read()
    os.kill(os.getpid(), signal.SIGTERM)
serve._say = ask
from dflash_trt.__main__ import main
main()
"""


@pytest.mark.full
@pytest.mark.parametrize("level", ["info", "debug"])
def test_probes_are_logged_for_debugging_only(level: str) -> None:
    engine, target = trained_engine("tiny-qwen3"), FIXTURES / "tiny-qwen3"
    words = ["serve", engine, "--target", target, "--port", "0", "--log-format", "json", "--log-level", level]
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *map(str, words)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    messages = [json.loads(line)["message"] for line in done.stderr.splitlines()]
    assert [message for message in messages if " GET /version 200 " in message], done.stderr
    assert bool([message for message in messages if " GET /health 200 " in message]) == (level == "debug")
