# SPDX-License-Identifier: Apache-2.0
"""The command: progress, a port that is taken, SIGTERM."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.cli.commands import run
from tests.runtime.server.live import PATIENCE, until
from tests.runtime.server.process import children, started

LONG = {"prompt": "def f(", "max_tokens": 400, "ignore_eos": True, "temperature": 0, "stream": True}


def test_sigterm_lets_answers_end(engine: Path, chat_target: Path, tmp_path: Path) -> None:
    with started(engine, chat_target, tmp_path / "log", "--served-model-name", "m") as process:
        url = process.await_url()
        assert process.text.index("loading ") < process.text.index("serving m on ")
        until(lambda: len(children(process.popen.pid)) == 3)  # a process that compiles grammars waits for the first one
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            process.popen.send_signal(signal.SIGTERM)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert process.popen.wait(PATIENCE) == 0
        assert "Traceback" not in process.text
        assert "leaked" not in process.text
        assert "POST /v1/completions 200" in process.text
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


def test_a_port_in_use_is_said_before_loading(engine: Path, chat_target: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("serve", engine, "--target", chat_target, "--port", port)
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: --port: expected a free port on 127.0.0.1, found {port}: ")
    assert "loading" not in result.stderr


def test_what_is_no_engine_is_one_error(chat_target: Path, tmp_path: Path) -> None:
    result = run("serve", tmp_path, "--target", chat_target, "--port", 0)
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr
