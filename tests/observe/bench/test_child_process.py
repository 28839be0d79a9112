# SPDX-License-Identifier: Apache-2.0
"""Nothing that was started goes on alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_trt.observe.bench.child_process import child_process

PATIENCE = 60.0
STARTS = """
import sys
from dflash_trt.observe.bench.child_process import child_process
with child_process(["/bin/sleep", "600"], sys.stderr.fileno()) as process:
    print(process.pid, flush=True)
    process.wait()
"""


def is_running(process: int) -> bool:
    """Zombies are over."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(process: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while is_running(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_ends_with_its_block(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, child_process(["/bin/sleep", "600"], log.fileno()) as process:
        assert is_running(process.pid)
    assert process.returncode == -signal.SIGTERM


def test_it_says_how_it_ended(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("wb") as log,
        child_process(["/bin/sh", "-c", "echo a; exit 3"], log.fileno()) as process,
    ):
        assert process.wait(PATIENCE) == 3
    assert (tmp_path / "log").read_text() == "a\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_it_ends_with_who_started_it(number: signal.Signals) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child = int(starter.stdout.readline())
    assert is_running(child)
    os.kill(starter.pid, number)
    starter.wait(PATIENCE)
    await_end(child)
