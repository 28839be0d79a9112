# SPDX-License-Identifier: Apache-2.0
"""Servers that a trial starts: what is installed for a deployment's runtime, or our own for an engine."""

from __future__ import annotations

import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import msgspec

from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.render import Rendered, render
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.steps import commands_for_draft
from dflash_trt.errors import ConfigError, EndpointError, MissingDependencyError
from dflash_trt.files.command import command_line
from dflash_trt.files.read import open_file
from dflash_trt.observe.bench.child_process import child_process
from dflash_trt.observe.endpoints.client import Client

HOST = "127.0.0.1"
START_SECONDS = 3600.0
"""Time for a large target on a slow disk."""
POLL_SECONDS = 0.5
TAIL_BYTES = 2048
Waiting = Callable[[float, str], None]
"""Called while a server loads, with the seconds so far and the last line of its output."""


class TrialServer(msgspec.Struct, frozen=True, kw_only=True):
    """A command that serves on a port of this machine."""

    words: list[str]
    """The program's path first; {} stands for `file`."""
    port: int
    file: str | None = None
    """Text of a file that the command reads."""

    @contextmanager
    def running(self, waiting: Waiting) -> Iterator[str]:
        """The URL once it answers; raises EndpointError with the end of its output where it does not.

        Whatever the server started has ended when the block ends, and where this process is killed.
        """
        with tempfile.TemporaryDirectory(prefix="dflash-trt-try-") as folder:
            file, log = Path(folder, "serve.yaml"), Path(folder, "log")
            if self.file is not None:
                file.write_text(self.file)
            words = [str(file) if word == "{}" else word for word in self.words]
            with log.open("wb") as output, child_process(words, output.fileno()) as process:
                url = f"http://{HOST}:{self.port}"
                self._wait(process, url, log, waiting)
                yield url

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


def engine_server(engine: Path, target: str | None, method: Method) -> TrialServer:
    """Our own server of an engine directory; plain where `method` is none."""
    port = free_port()
    words = [sys.executable, "-m", "dflash_trt", "serve", str(engine), "--host", HOST, "--port", str(port)]
    words += ["--drain-seconds", "0", "--no-enable-prefix-caching"]  # every method computes the same prompts
    words += [] if target is None else ["--target", target]
    return TrialServer(words=words + (["--draft-length", "0"] if method == "none" else []), port=port)


def installed_runtimes() -> dict[Runtime, str]:
    """Program by runtime that is installed here."""
    programs: dict[Runtime, str | None] = {"trtllm": shutil.which("trtllm-serve"), "vllm": shutil.which("vllm")}
    found = {runtime: path for runtime, path in programs.items() if path is not None}
    if find_spec("sglang") is not None:
        found["sglang"] = sys.executable
    return found


def chosen_runtime(deployment: ResolvedDeployment, asked: Runtime | None, source: str) -> Runtime:
    """The runtime asked for, or the first that is installed; MissingDependencyError where it is not.

    Raises ConfigError for GPUs of several nodes.
    """
    wanted = deployment.runtimes if asked is None else (asked,)
    steps = command_line(["dflash-trt", "serve-config", source, "--runtime", wanted[0], "-o", "FILE"])
    if deployment.gpus.nodes > 1:
        raise ConfigError(
            f"{deployment.name}: expected GPUs of this node, found {deployment.gpus}",
            hint=f"start it on each node, then ask doctor: {steps}",
        )
    if (runtime := next((each for each in wanted if each in installed_runtimes()), None)) is not None:
        return runtime
    raise MissingDependencyError(
        f"{deployment.name}: expected {' or '.join(wanted)} to be installed here, found none",
        hint=f"install one, or use its container: {steps}",
    )


def deployment_server(deployment: ResolvedDeployment, runtime: Runtime, method: Method, source: str) -> TrialServer:
    """The installed runtime with the configuration that `serve-config` writes.

    Raises ConfigError for a draft that has yet to be converted or built.
    """
    port = free_port()
    rendered = render(deployment, runtime, method, host=HOST, port=port)
    if commands := commands_for_draft(deployment, source, runtime, method):
        raise ConfigError(f"{deployment.name}: expected the draft here, found none", hint=commands[0])
    words = _words(rendered, runtime)
    program = installed_runtimes()[runtime]
    words = [program if word in ("trtllm-serve", "vllm") else word for word in words]
    if words[0] == "python":
        words[0] = sys.executable
    file = rendered.text if runtime == "trtllm" else None
    return TrialServer(words=words, port=port, file=file)


def _words(rendered: Rendered, runtime: Runtime) -> list[str]:
    text = rendered.start if runtime == "trtllm" else rendered.text
    return ["{}" if word == "FILE" else word for word in shlex.split(text.replace("\\\n", " "), comments=True)]
