# SPDX-License-Identifier: Apache-2.0
"""SIGTERM at any moment of many streams: the process ends with 0, and every client hears how its stream ended."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.runtime.server.live import PATIENCE, until
from tests.runtime.server.process import LONG, refuses
from tests.runtime.server.test_soak import answer, post

NUM_SIGNALS = 50
NUM_STREAMS = 8
# For each line the command in a process of its own, with models that were loaded once: that alone takes seconds.
FORK = """
import os, sys
from pathlib import Path
from dflash_trt.cli import main
from dflash_trt.runtime import session as session_module

engine, target = sys.argv[1:]
session = session_module.open_session(Path(engine), target)
session_module.load_session = lambda pair, options: session
sys.modules["xgrammar"] = None  # what compiles grammars imports for 3 s, once a server
for line in sys.stdin:
    drain, log = line.split()
    if (child := os.fork()) == 0:
        for descriptor in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), descriptor)
        sys.argv = ["dflash-trt", "serve", engine, "--target", target, "--port", "0", "--drain-seconds", drain]
        main()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@contextmanager
def forking(engine: Path, target: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # threads do not survive a fork
    command = [sys.executable, "-c", FORK, str(engine), str(target)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ending(response: bytes) -> str:
    """Of one stream; AssertionError for one that breaks off."""
    if not response:
        return "no response"
    if response.startswith(b"HTTP/1.1 503 "):
        return "503"
    assert response.startswith(b"HTTP/1.1 200 "), response
    *_, last, done = re.findall(rb"data: (.*)\n", response)
    assert done == b"[DONE]", response
    document = json.loads(last)
    if "error" in document:
        assert "shutting down" in document["error"]["message"]
        return "error event"
    assert document["choices"][0]["finish_reason"] == "length"
    return "whole"


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_every_client_is_told(engine: Path, chat_target: Path, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    endings: Counter[str] = Counter()

    async def stream(url: str, max_tokens: int) -> None:
        body = json.dumps(LONG | {"max_tokens": max_tokens}).encode()
        try:
            response = await answer(url, post(body, "connection: close"))
        except ConnectionError:  # no longer accepted
            response = b""
        endings[ending(response)] += 1

    async def signal_during_streams(url: str, child: int, max_tokens: int) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_STREAMS):
                group.create_task(stream(url, max_tokens))
            await asyncio.sleep(draw.uniform(0, 0.3))
            os.kill(child, signal.SIGTERM)

    with forking(engine, chat_target) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for i in range(NUM_SIGNALS):
            log = tmp_path / f"{i}.log"
            process.stdin.write(f"{0 if i % 2 else 60} {log}\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            until(lambda log=log: log.exists() and "serving " in log.read_text())
            (url,) = re.findall(r"serving .* on (http://\S+)\n", log.read_text())
            until(lambda url=url: not refuses(url))
            asyncio.run(asyncio.wait_for(signal_during_streams(url, child, 2000 if i % 2 else 40), PATIENCE))
            assert process.stdout.readline() == "0\n", log.read_text()
            assert "Traceback" not in log.read_text(), log.read_text()
    assert sum(endings.values()) == NUM_SIGNALS * NUM_STREAMS
    assert min(endings["whole"], endings["error event"]) > NUM_SIGNALS, endings
    assert endings["no response"] < NUM_SIGNALS, endings
