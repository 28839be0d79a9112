# SPDX-License-Identifier: Apache-2.0
"""Programs that this process starts end with their block and with this process, and the time they use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.observe.servers.local_server import child_process
from dflash_trt.observe.servers.processor_time import ProcessorTime, processor_time
from tests.observe.servers.processes import is_running, until_ended
from tests.waiting import PATIENCE, until

STARTS = """
import sys
from dflash_trt.observe.servers.local_server import child_process
with child_process(["/bin/sleep", "3600"], sys.stderr.fileno()) as process:
    print(process.pid, flush=True)
    process.wait()
"""


def test_it_ends_with_its_block_and_says_how(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, child_process(["/bin/sleep", "3600"], log.fileno()) as process:
        assert is_running(process.pid)
    assert process.returncode == -signal.SIGTERM
    with (
        (tmp_path / "log").open("wb") as log,
        child_process(["/bin/sh", "-c", "echo a; exit 3"], log.fileno()) as process,
    ):
        assert process.wait(PATIENCE) == 3
    assert (tmp_path / "log").read_text() == "a\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_it_ends_with_who_started_it(number: signal.Signals) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    child = int(starter.stdout.readline())
    assert is_running(child)
    os.kill(starter.pid, number)
    starter.wait(PATIENCE)
    until_ended(child)


# The daemon has left its session and lost its parent.
DAEMON = """
import sys
from dflash_trt.observe.servers.local_server import child_process
script = "(setsid sh -c 'echo $$ >&3; exec sleep 3600' &) ; wait; exec sleep 3600"
with child_process(["/bin/sh", "-c", f"exec 3>{sys.argv[1]}; {script}"], sys.stderr.fileno()) as process:
    print(process.pid, flush=True)
    process.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_daemons_of_it_end_too(number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "daemon"
    starter = subprocess.Popen([sys.executable, "-c", DAEMON, str(file)], stdout=subprocess.PIPE, text=True)
    child = int(starter.stdout.readline())
    until(lambda: file.exists() and file.read_text().strip())
    daemon = int(file.read_text())
    assert is_running(daemon)
    assert os.getsid(daemon) != os.getsid(child)
    os.kill(starter.pid, number)
    starter.wait(PATIENCE)
    until_ended(child)
    until_ended(daemon)


def test_a_program_that_is_not_there_says_so(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log, child_process(["/no/such"], log.fileno()) as process:
        assert process.wait(PATIENCE) == 127
    assert (tmp_path / "log").read_text() == "/no/such: No such file or directory\n"


SPIN = "import os; os.sched_setaffinity(0, {%d}); os.fork()\nwhile True: pass"


def test_what_two_processes_use_and_wait_for() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN % min(os.sched_getaffinity(0))]) as process:
        until(lambda: processor_time(process.pid).used > 0.2)
        spent = processor_time(process.pid)
        subprocess.run(["pkill", "--parent", str(process.pid)], check=True)
        process.kill()
    assert spent.waited > 0.05
    until(lambda: processor_time(process.pid) == (0.0, 0.0))


def test_waits_of_threads_that_have_ended_do_not_count_below_zero() -> None:
    assert ProcessorTime(3.0, 1.0) - ProcessorTime(1.0, 2.0) == (2.0, 0.0)
