# SPDX-License-Identifier: Apache-2.0
"""Measures the server alone: CPU time of 1,000 streamed tokens and of 100 whole answers, and how late tokens leave it.

The server runs in a process of its own, with a stand-in for the runtime that costs nothing and steps at a fixed rate;
clients are raw sockets in this one. With --against REV a worktree of another commit is served too, and both take turns.
A CPU time is the least of its rounds, since all that disturbs it adds to it. The time to the client is from the
acceptance of a token to its arrival in this process, later than at the server's socket, once all streams have begun.
Prints tables, asserts nothing; takes two minutes for each commit, best on a machine that does nothing else.
"""

from __future__ import annotations

import json
import math
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402

STREAMS = (1, 16, 64)
MANY = 256
NUM_REQUESTS = 100
STEPS = 1000
"""Steps of a streamed answer."""
LAG_STEPS = 100
WHOLE_TOKENS = 16
ACCEPTED = re.compile(rb'"(?:text|content)":"(\d+\.\d+) "')


@dataclass
class Client:
    """One connection, which sends the same request again and again."""

    port: int
    request: bytes
    left: int
    """Answers still to come."""
    is_streamed: bool
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    _answer: bytes = b""

    def __post_init__(self) -> None:
        self.socket = socket.create_connection(("127.0.0.1", self.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self) -> None:
        self._answer = b""
        self.socket.sendall(self.request)

    def receive(self) -> bool:
        """Whether the last answer is complete."""
        data = self.socket.recv(2**16)
        now = time.perf_counter()
        assert data, self._answer
        if self.is_streamed:
            self.arrivals.append((now, data))
            self._answer = self._answer[-5:] + data
            if not self._answer.endswith(b"0\r\n\r\n"):
                return False
        else:
            self._answer += data
            head, _, body = self._answer.partition(b"\r\n\r\n")
            size = re.search(rb"content-length: (\d+)", head)
            if size is None or len(body) < int(size[1]):
                return False
        self.left -= 1
        if self.left:
            self.send()
        return self.left == 0


@dataclass
class Server:
    """A server process of one commit."""

    name: str
    process: subprocess.Popen[str]
    port: int

    def cpu_seconds(self, tokens: int, seconds: float) -> float:
        """CPU time so far; sets tokens and seconds of a step."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{tokens} {seconds}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@dataclass(frozen=True)
class Load:
    """Requests of a measurement, and the stand-in's steps meanwhile."""

    path: str
    streams: int
    tokens: int
    """Tokens of a step."""
    seconds: float
    """Duration of a step."""
    is_streamed: bool
    steps: int = STEPS

    @property
    def name(self) -> str:
        kind = f"streams, {self.tokens} tokens a step" if self.is_streamed else "whole answers at once"
        return f"{self.path}: {self.streams} {kind}"

    def request(self) -> bytes:
        prompt = {"prompt": "x"} if self.path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
        size = self.steps * self.tokens if self.is_streamed else WHOLE_TOKENS
        body = json.dumps({**prompt, "max_tokens": size, "temperature": 0, "stream": self.is_streamed}).encode()
        head = "content-type: application/json\r\naccept: */*\r\nauthorization: Bearer none\r\nuser-agent: bench\r\n"
        lines = (
            f"POST /v1/{'' if self.path == 'completions' else 'chat/'}completions HTTP/1.1\r\nhost: localhost\r\n{head}"
        )
        return f"{lines}content-length: {len(body)}\r\n\r\n".encode() + body

    def run(self, server: Server) -> tuple[float, list[float]]:
        """CPU seconds of the server for 1,000 streamed tokens or 100 answers; seconds from acceptance to arrival."""
        each = 1 if self.is_streamed else -(-NUM_REQUESTS // self.streams)
        clients = [Client(server.port, self.request(), each, self.is_streamed) for _ in range(self.streams)]
        begin = server.cpu_seconds(self.tokens, self.seconds)
        with selectors.DefaultSelector() as selector:
            for client in clients:
                selector.register(client.socket, selectors.EVENT_READ, client)
                client.send()
            while selector.get_map():
                for key, _ in selector.select():
                    if key.data.receive():
                        selector.unregister(key.fileobj)
        used = server.cpu_seconds(self.tokens, self.seconds) - begin
        for client in clients:
            client.socket.close()
        begun = max((client.arrivals[0][0] for client in clients if client.arrivals), default=0.0)
        lags = [
            arrived - float(accepted)
            for client in clients
            for arrived, data in client.arrivals
            for accepted in ACCEPTED.findall(data)
            if float(accepted) > begun  # before, other requests were still being read
        ]
        if self.is_streamed:
            return used * 1000 / (self.streams * self.steps * self.tokens), lags
        return used * NUM_REQUESTS / (self.streams * each), lags


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    git = ["git", "-C", str(REPOSITORY), "worktree"]
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", root, revision], check=True)
        try:
            yield root
        finally:
            subprocess.run([*git, "remove", "--force", root], check=True)


@contextmanager
def serving(name: str, root: Path) -> Iterator[Server]:
    command = [sys.executable, str(Path(__file__).with_name("host_server.py")), str(root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Server(name, process, int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


def loads(step_ms: float) -> list[Load]:
    kinds = [*(("completions", streams, 1) for streams in STREAMS), ("completions", 64, 4), ("chat", 64, 1)]
    streamed = [Load(*kind, step_ms / 1000, is_streamed=True) for kind in kinds]
    return streamed + [Load("completions", streams, WHOLE_TOKENS, 0.001, is_streamed=False) for streams in STREAMS]


def show_cpu(servers: Sequence[Server], rounds: int, step_ms: float) -> None:
    rows = []
    for load in loads(step_ms):
        used = [math.inf] * len(servers)
        for number in range(rounds + 1):
            for index, server in enumerate(servers):
                seconds, _ = load.run(server)
                if number:  # the first round warms up
                    used[index] = min(used[index], seconds)
        rows.append((load.name, *(f"{each:.3f}" for each in used), *(f"{used[0] / each:.2f}" for each in used[1:])))
    names = [server.name for server in servers]
    title = f"CPU seconds of the server for 1,000 streamed tokens, or for {NUM_REQUESTS} answers; {cpu_model()}"
    print_table(title, ("load", *names, *(f"ratio to {name}" for name in names[1:])), rows)


def show_lags(servers: Sequence[Server], steps_ms: Sequence[float]) -> None:
    rows = []
    for step_ms in steps_ms:
        for server in servers:
            load = Load("completions", MANY, 4, step_ms / 1000, is_streamed=True, steps=LAG_STEPS)
            load.run(server)
            _, lags = load.run(server)
            cells = (f"{1000 * value:.1f}" for value in np.percentile(lags, [50, 99, 100]))
            rows.append((f"{step_ms:g} ms", server.name, *cells))
    print_table(f"ms from acceptance to the client, {MANY} streams", ("step", "commit", "p50", "p99", "max"), rows)


@click.command(help=__doc__)
@click.option("--against", metavar="REV", help="A commit to take turns with.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--step-ms", type=float, default=5.0, show_default=True, help="Time of a step; stretches while it is late."
)
def main(against: str | None, rounds: int, step_ms: float) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(serving("this", REPOSITORY))]
        if against is not None:
            servers.append(stack.enter_context(serving(against, stack.enter_context(worktree(against)))))
        show_cpu(servers, rounds, step_ms)
        show_lags(servers, (20, 50))


if __name__ == "__main__":
    main()
