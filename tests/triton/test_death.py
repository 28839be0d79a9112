# SPDX-License-Identifier: Apache-2.0
"""The model process is killed in mid-stream: clients get an error, and the server ends so that it can be restarted."""

from __future__ import annotations

import http.client
import os
import select
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_trt.triton.watchdog import GRACE_SECONDS
from tests.triton.environment import environment
from tests.triton.grpc_client import GrpcClient
from tests.triton.server import PATIENCE, RefusedError, Server

pytestmark = pytest.mark.full
LONG = {"text_input": "import os\n", "sampling_param_max_tokens": 1500}


def test_killed_in_mid_stream(repository: Path, tmp_path: Path) -> None:
    server = Server(environment(), repository, tmp_path / "log")
    has_begun = threading.Semaphore(0)

    def over_http() -> None:
        for _ in server.stream(LONG):
            has_begun.release()

    def over_grpc() -> None:
        with GrpcClient(server) as client:
            for _ in client.stream({**LONG, "streaming": True}):
                has_begun.release()

    try:
        server.await_ready()
        with ThreadPoolExecutor(2) as pool:
            clients: list[Future[None]] = [pool.submit(over_http), pool.submit(over_grpc)]
            for _ in range(8):
                assert has_begun.acquire(timeout=PATIENCE)
            os.kill(server.model_process(), signal.SIGKILL)
            killed = time.monotonic()
            errors = [client.exception(PATIENCE) for client in clients]
        assert isinstance(errors[0], (http.client.IncompleteRead, ConnectionError)), errors
        assert isinstance(errors[1], RefusedError), errors
        server.process.wait(PATIENCE)
        assert time.monotonic() - killed < 2 * GRACE_SECONDS + 5
        assert b"has died; terminating " in server.log.read_bytes()
    finally:
        server.stop()


def test_a_killed_server_takes_its_model_along(repository: Path, tmp_path: Path) -> None:
    server = Server(environment(), repository, tmp_path / "log")
    server.await_ready()
    model = os.pidfd_open(server.model_process())
    server.process.kill()
    assert select.select([model], [], [], PATIENCE)[0]


def test_an_orderly_end_leaves_nothing_behind(repository: Path, tmp_path: Path) -> None:
    server = Server(environment(), repository, tmp_path / "log")
    server.await_ready()
    model = server.model_process()
    server.stop()
    assert server.process.returncode == 0
    assert not Path(f"/proc/{model}").exists()
    assert b"has died" not in server.log.read_bytes()
    watchdogs = [path for path in Path("/proc").glob("[0-9]*/cmdline") if _is_watchdog_of(path, model)]
    assert watchdogs == []


def _is_watchdog_of(cmdline: Path, model: int) -> bool:
    try:
        words = cmdline.read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile
        return False
    return b"dflash_trt.triton.watchdog" in words and str(model).encode() in words
