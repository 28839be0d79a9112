# SPDX-License-Identifier: Apache-2.0
"""The watchdog ends the server when the model process has died, and the other way round."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


def start(command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()  # it runs
    return process


@pytest.mark.parametrize(
    ("server_command", "expected"),
    [
        (SLEEP, -signal.SIGTERM),
        pytest.param([sys.executable, "-c", STUBBORN], -signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_a_dead_model_ends_its_server(server_command: list[str], expected: int) -> None:
    model, server = start(SLEEP), start(server_command)
    watchdog = watchdog_of(model, server)
    model.kill()
    assert server.wait(30) == expected
    assert watchdog.wait(30) == 0
    assert watchdog.stderr is not None
    assert f"model process {model.pid} has died; terminating server {server.pid}" in watchdog.stderr.read().decode()


@pytest.mark.full
def test_a_dead_server_ends_its_model() -> None:
    """It would keep its memory for ever."""
    model, server = start(SLEEP), start(SLEEP)
    watchdog = watchdog_of(model, server)
    server.kill()
    assert model.wait(30) == -signal.SIGTERM
    assert watchdog.wait(30) == 0
    assert watchdog.stderr is not None
    assert f"server {server.pid} has died; terminating model process {model.pid}" in watchdog.stderr.read().decode()


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.full)])
def test_an_orderly_end_of_both_is_none_of_its_business(first: int) -> None:
    processes = [start(SLEEP), start(SLEEP)]
    watchdog = watchdog_of(*processes)
    watchdog.send_signal(signal.SIGSTOP)  # sees both ends at once
    for process in (processes[first], processes[1 - first]):
        process.kill()
    watchdog.send_signal(signal.SIGCONT)
    assert watchdog.wait(30) == 0
    assert watchdog.stderr is not None
    assert watchdog.stderr.read() == b""


def watchdog_of(model: subprocess.Popen[bytes], server: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dflash_trt.triton.watchdog", str(model.pid), str(server.pid)]
    return subprocess.Popen(command, stderr=subprocess.PIPE)
