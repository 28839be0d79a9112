# SPDX-License-Identifier: Apache-2.0
"""Starts ranks as forks of one process that has imported everything, because eight times that takes half a minute.

Each rank finds the variables of torchrun in its environment, and joins the others as it would there.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from dflash_trt.runtime.ranks import roles
from tests.paths import REPOSITORY
from tests.waiting import PATIENCE

WHAT_RANKS_IMPORT = (
    "dflash_trt.cli",
    "dflash_trt.runtime.measure.feature_capture",
    "dflash_trt.runtime.load",
    "tests.runtime.ranks.test_sharded_target",
    "torch.distributed.tensor",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "transformers.models.qwen3.modeling_qwen3",
)


@dataclass(frozen=True)
class Outcome:
    """Exit status and output of the ranks, by rank."""

    codes: list[int]
    """Exit codes as subprocess gives them: a signal is negative."""
    stdout: list[str]
    stderr: list[str]
    seconds: float


class Forks:
    """The process that forks."""

    def __init__(self, process: subprocess.Popen[str], logs: Path) -> None:
        self._process = process
        self._logs = logs

    def run(self, num_ranks: int, role: str, *arguments: object) -> Outcome:
        """Runs a role of `script` on `num_ranks` ranks."""
        begin = time.monotonic()
        print(json.dumps([num_ranks, role, *map(str, arguments)]), file=self._process.stdin, flush=True)
        codes = json.loads(self._process.stdout.readline())
        seconds = time.monotonic() - begin
        stdout, stderr = (
            [(self._logs / f"{rank}.{stream}").read_text() for rank in range(num_ranks)] for stream in ("out", "err")
        )
        return Outcome(codes, stdout, stderr, seconds)


@contextmanager
def forks(logs: Path) -> Iterator[Forks]:
    """Starts the process, and ends it with whatever it has started."""
    command = [sys.executable, "-m", "tests.runtime.ranks.forks", str(logs)]
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},  # `join` sets it too late for a fork: torch is imported
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # excludes imports from the ranks' time
        yield Forks(process, logs)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def main(logs: str) -> None:
    """Reads jobs from stdin, one JSON list a line, and answers with the ranks' exit codes."""
    for module in WHAT_RANKS_IMPORT:
        importlib.import_module(module)
    roles.SHUTDOWN_SECONDS = 2 * PATIENCE  # a rank that another one's end does not end is killed, and its code says so
    print("ready", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        num_ranks, *job = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        pids = [_fork(rank, num_ranks, port, Path(logs), job) for rank in range(num_ranks)]
        print(json.dumps(_wait(pids)), flush=True)


def _fork(rank: int, num_ranks: int, port: int, logs: Path, job: list[str]) -> int:
    pid = os.fork()
    if pid == 0:
        _become_rank(rank, num_ranks, port, logs, job)
    return pid


def _become_rank(rank: int, num_ranks: int, port: int, logs: Path, job: list[str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(logs / f"{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from tests.runtime.ranks.script import main as run

    code = 70
    try:
        code = run(str(num_ranks), *job)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 70
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pids: list[int]) -> list[int]:
    """Exit codes in the order of `pids`; what still runs at the end of the time is killed."""
    signal.signal(signal.SIGALRM, lambda number, frame: [os.kill(pid, signal.SIGKILL) for pid in pids])
    signal.alarm(int(PATIENCE))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    signal.alarm(0)
    return codes


if __name__ == "__main__":
    main(*sys.argv[1:])
