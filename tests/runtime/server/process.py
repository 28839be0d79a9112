# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt serve` in a process of its own, as people start it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.runtime.server.live import PATIENCE

LONG = {"prompt": "def f(", "max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True}


class Process:
    """A server that has been started."""

    def __init__(self, engine: Path, target: Path, log: Path, *options: object) -> None:
        self.log = log
        arguments = ["serve", engine, "--target", target, "--port", 0, *options]
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "dflash_trt", *map(str, arguments)],
                env=os.environ,
                stdout=file,
                stderr=file,
            )

    @property
    def text(self) -> str:
        return self.log.read_text()

    def await_url(self) -> str:
        """Until it serves; where."""
        deadline = time.monotonic() + PATIENCE
        while (found := re.search(r"serving .* on (http://\S+)\n", self.text)) is None:
            assert self.popen.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
        while True:
            try:
                httpx.get(f"{found[1]}/health", timeout=PATIENCE)
                return found[1]
            except httpx.ConnectError:
                assert time.monotonic() < deadline, self.text
                time.sleep(0.02)

    def await_log(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.text:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)


@contextmanager
def started(engine: Path, target: Path, log: Path, *options: object) -> Iterator[Process]:
    process = Process(engine, target, log, *options)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.wait()


def refuses(url: str) -> bool:
    try:
        httpx.get(f"{url}/health", timeout=PATIENCE)
    except httpx.TransportError:
        return True
    return False


def children(pid: int) -> list[int]:
    """Of a process, and theirs; a thread that ends meanwhile has none."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found + [grandchild for child in found for grandchild in children(child)]
