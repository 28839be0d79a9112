# SPDX-License-Identifier: Apache-2.0
"""Starts tritonserver and asks it over HTTP; no wait is unbounded."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_trt.triton.repository import server_command
from tests.triton.environment import Environment

PATIENCE = 60.0
"""Seconds after which something hangs."""
LOOPBACK = "127.0.0.1"
Json = dict[str, Any]


class RefusedError(Exception):
    """An error response: status and message."""


class Server:
    """A running tritonserver, started as `triton-repo` says but for ports and where the backend lies."""

    def __init__(
        self,
        environment: Environment,
        repository: Path,
        log: Path,
        *options: str,
        sites: tuple[Path, ...] = (),
        launcher: tuple[str, ...] = (),
    ) -> None:
        self.http, self.grpc, self.prometheus = _free_ports(3)
        self.log = log
        command = server_command(repository, LOOPBACK)
        command[0] = str(environment.triton / "bin" / command[0])
        command += [f"--http-port={self.http}", f"--grpc-port={self.grpc}", f"--metrics-port={self.prometheus}"]
        command += [f"--backend-directory={environment.triton / 'backends'}", *options]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*launcher, *command], env=environment.variables(sites), stdout=file, stderr=file
            )

    def await_ready(self) -> None:
        """Wait for the health check to succeed."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                self.get("/v2/health/ready")
                return
            except OSError:
                time.sleep(0.1)
        raise AssertionError(f"not ready:\n{self.log.read_text(errors='replace')[-4000:]}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()

    def get(self, path: str, port: int | None = None) -> str:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port or self.http}{path}", timeout=PATIENCE) as response:
            return str(response.read().decode())

    def post(self, path: str, body: Json | bytes) -> Iterator[str]:
        """The lines of the answer; raises RefusedError for an error status."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.http}{path}", data, timeout=PATIENCE) as response:
                yield from _lines(response)
        except urllib.error.HTTPError as error:
            raise RefusedError(error.code, error.read().decode(errors="replace")) from None

    def generate(self, body: Json | bytes, model: str = "tensorrt_llm") -> Json:
        """One answer."""
        answer: Json = json.loads("".join(self.post(f"/v2/models/{model}/generate", body)))
        return answer

    def stream(self, body: Json, model: str = "tensorrt_llm") -> Iterator[Json]:
        """The events of a streamed answer."""
        for line in self.post(f"/v2/models/{model}/generate_stream", {"streaming": True, **body}):
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))

    def reading(self, name: str) -> float:
        """A figure of the metrics page."""
        page = self.get("/metrics", self.prometheus)
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", page, re.MULTILINE)
        assert found, f"{name} is not on the page:\n{page}"
        return float(found[1])

    def await_reading(self, name: str, value: float) -> None:
        deadline = time.monotonic() + PATIENCE
        while self.reading(name) != value:
            assert time.monotonic() < deadline, f"{name}: expected {value}, found {self.reading(name)}"
            time.sleep(0.05)

    def model_process(self) -> int:
        """The Python backend's process: the server's child that is called a stub."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        stubs = [int(child) for child in children if "python" in Path(f"/proc/{child}/comm").read_text()]
        assert len(stubs) == 1, stubs
        return stubs[0]


def _lines(response: http.client.HTTPResponse) -> Iterator[str]:
    """Lines as they come; `readline` takes a broken connection for the end, `read1` raises IncompleteRead."""
    rest = b""
    while piece := response.read1():
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line.decode() for line in lines)
    if rest:
        yield rest.decode()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((LOOPBACK, 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports
