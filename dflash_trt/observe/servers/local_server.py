# SPDX-License-Identifier: Apache-2.0
"""Servers on this machine that end, with all that they started, when the block ends or this process is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from dflash_trt.errors import EndpointError
from dflash_trt.files.command import command_line
from dflash_trt.files.read import open_file
from dflash_trt.observe.endpoints.client import Client

HOST = "127.0.0.1"
START_SECONDS = 3600.0
"""Time for a large target on a slow disk."""
POLL_SECONDS = 0.5
TAIL_BYTES = 2048
STOP_SECONDS = 20
SUPERVISOR = Path(__file__).with_name("supervisor.py")
Waiting = Callable[[float, str], None]
"""Called while a server loads, with the seconds so far and the last line of its output."""


@contextmanager
def child_process(
    words: Sequence[str], log: int, *, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program, by its path, that writes to the descriptor `log`; it and its descendants end with the block."""
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", str(SUPERVISOR), str(reader), str(STOP_SECONDS), *words]
    try:
        process = subprocess.Popen(  # noqa: S603  # our own words
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            pass_fds=(reader,),
        )  # fmt: skip
    except BaseException:
        os.close(writer)
        raise
    finally:
        os.close(reader)
    try:
        yield process
    finally:
        os.close(writer)  # the supervisor asks the program to stop, and ends what is left
        process.wait()


class RunningServer(msgspec.Struct, frozen=True):
    """A server that answers."""

    url: str
    process: int
    """Process id of its supervisor, from which the server descends."""


class LocalServer(msgspec.Struct, frozen=True, kw_only=True):
    """A command that serves on a port of this machine."""

    words: list[str]
    """The program's path first; {} stands for `file`."""
    port: int
    file: str | None = None
    """Text of a file that the command reads."""
    environment: dict[str, str] = {}
    """Variables beside this process's own."""

    @contextmanager
    def running(self, waiting: Waiting) -> Iterator[RunningServer]:
        """The server once it answers; if it does not, raises EndpointError with the end of its output.

        All processes of the server end with the block, and if this process is killed.
        """
        with tempfile.TemporaryDirectory(prefix="dflash-trt-serve-") as folder:
            file, log = Path(folder, "serve.yaml"), Path(folder, "log")
            if self.file is not None:
                file.write_text(self.file)
            words = [str(file) if word == "{}" else word for word in self.words]
            environment = os.environ | self.environment
            with log.open("wb") as output, child_process(words, output.fileno(), environment=environment) as process:
                url = f"http://{HOST}:{self.port}"
                self._wait(process, url, log, waiting)
                yield RunningServer(url, process.pid)

    def _wait(self, process: subprocess.Popen[bytes], url: str, log: Path, waiting: Waiting) -> None:
        began = time.monotonic()
        with Client(url, timeout=10) as client:
            while (seconds := time.monotonic() - began) < START_SECONDS:
                if process.poll() is not None:
                    what = command_line(self.words[:4])
                    raise EndpointError(f"{what} ... did not start: {_tail(log) or 'no message'}")
                try:
                    client.get("/health")
                except EndpointError:
                    waiting(seconds, _tail(log).rpartition("\n")[2])
                    time.sleep(POLL_SECONDS)
                else:
                    return
        raise EndpointError(f"{url}: expected an answer within {START_SECONDS:.0f} s, found none: {_tail(log)}")


def _tail(log: Path) -> str:
    """The last whole lines of a server's output."""
    with open_file(log, EndpointError) as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return stream.read().decode(errors="replace").strip()


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.create_server((HOST, 0)) as listening:
        return int(listening.getsockname()[1])


def engine_words(engine: Path, **options: object) -> list[str]:
    """`dflash-trt serve ENGINE` without the program; options that are None are left out."""
    words = ["serve", str(engine), "--no-enable-prefix-caching"]  # every method and point computes the same prompts
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def engine_server(words: list[str], environment: dict[str, str] | None = None) -> LocalServer:
    """Our own server, by its `engine_words`."""
    port = free_port()
    address = ["--host", HOST, "--port", str(port), "--drain-seconds", "0"]
    return LocalServer(
        words=[sys.executable, "-m", "dflash_trt", *words, *address], port=port, environment=environment or {}
    )
