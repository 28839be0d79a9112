# SPDX-License-Identifier: Apache-2.0
"""Starts a real tritonserver and asks it over HTTP and gRPC; no wait is unbounded.

It has an environment of its own that also sees this one's packages: nvidia-pytriton 0.7.0 brings Triton 2.51, whose
Python backend reads arrays of NumPy 1 only.
"""

from __future__ import annotations

import functools
import http.client
import json
import os
import platform
import queue
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from dflash_trt.triton.repository import server_command
from dflash_trt.triton.tensors import INPUTS
from tests.paths import REPOSITORY
from tests.waiting import PATIENCE, until

TYPES = {
    "STRING": ("BYTES", np.object_), "BOOL": ("BOOL", np.bool_), "INT32": ("INT32", np.int32),
    "UINT64": ("UINT64", np.uint64), "FP32": ("FP32", np.float32),
}  # fmt: skip
DATA_TYPES = {spec.name: spec.data_type for spec in INPUTS}


def tensor(name: str, value: object, data_type: str | None = None) -> triton.InferInput:
    """One input, of the type that the model has for it or of another one."""
    kind, dtype = TYPES[data_type or DATA_TYPES[name]]
    values = [
        item.encode() if isinstance(item, str) else item for item in (value if isinstance(value, list) else [value])
    ]
    found = triton.InferInput(name, [len(values)], kind)
    found.set_data_from_numpy(np.array(values, dtype=dtype))
    return found


class GrpcClient:
    """One stream to a server."""

    def __init__(self, server: Server) -> None:
        self._client = triton.InferenceServerClient(f"{LOOPBACK}:{server.grpc}")
        self._responses: queue.Queue[tuple[triton.InferResult, Exception | None]] = queue.Queue()
        self._client.start_stream(callback=lambda result, error: self._responses.put((result, error)))

    def __enter__(self) -> GrpcClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Unless it is cancelled, the end waits for answers under way, and after a failed test for ever.
        self._client.stop_stream(cancel_requests=kind not in (None, RefusedError))
        self._client.close()

    def leave(self) -> None:
        """Ends the stream in the middle of an answer."""
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def stream(
        self, inputs: Mapping[str, object] | list[triton.InferInput], request_id: str = ""
    ) -> Iterator[dict[str, Any]]:
        """The outputs of each response up to the final one; raises RefusedError for an error."""
        tensors = inputs if isinstance(inputs, list) else [tensor(*item) for item in inputs.items()]
        self._client.async_stream_infer(
            "tensorrt_llm", tensors, request_id=request_id, enable_empty_final_response=True
        )
        is_final = False
        while not is_final:
            result, error = self._responses.get(timeout=PATIENCE)
            if error is not None:
                raise RefusedError(str(error))
            response = result.get_response()
            outputs = {output.name: result.as_numpy(output.name)[0] for output in response.outputs}
            yield {name: value.decode() if isinstance(value, bytes) else value for name, value in outputs.items()}
            is_final = response.parameters["triton_final_response"].bool_param


PACKAGES = ("nvidia-pytriton==0.7.0", "numpy==1.26.4")
DIRECTORY = REPOSITORY / "build" / "pytriton-0.7.0"
SITES = "DFLASH_TEST_SITES"
"""Directories that a server's models may import from beside."""
BESIDE = (
    f"import os, site; list(map(site.addsitedir, filter(None, os.environ.get('{SITES}', '').split(':'))))\n"
    f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
)
MPI_LIBRARY = Path(sys.prefix) / "lib" / "libmpi.so.12"  # the mpich package's; mpi4py looks beside its Python


class Environment:
    """Where the server's files lie."""

    def __init__(self, directory: Path) -> None:
        self.bin = directory / "bin"
        self.triton = site_packages(directory) / "pytriton" / "tritonserver"

    def variables(self, sites: tuple[Path, ...]) -> dict[str, str]:
        """This environment first on PATH, where the Python backend looks, and the library of this very Python."""
        return os.environ | {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "LD_LIBRARY_PATH": sysconfig.get_config_var("LIBDIR"),
            "OMP_NUM_THREADS": "1", SITES: ":".join(map(str, sites)),
            **({"MPI4PY_LIBMPI": str(MPI_LIBRARY)} if MPI_LIBRARY.is_file() else {}),
        }  # fmt: skip


@functools.cache
def environment() -> Environment:
    """Made once a checkout; skips the test where it cannot be."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        pytest.skip("tritonserver: nvidia-pytriton has wheels for Linux on x86_64 only")
    library = Path(sysconfig.get_config_var("LIBDIR")) / (sysconfig.get_config_var("INSTSONAME") or "-")
    if not library.is_file():
        pytest.skip("tritonserver: its Python backend needs a Python that was built with its shared library")
    if not DIRECTORY.is_dir():
        _install(DIRECTORY)
    (site_packages(DIRECTORY) / "beside.pth").write_text(BESIDE)
    return Environment(DIRECTORY)


def site_packages(directory: Path) -> Path:
    return directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def _install(directory: Path) -> None:
    """Complete or not there: made under another name, then renamed."""
    temporary = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    try:
        venv.create(temporary, with_pip=False, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(temporary / "bin" / "python")]
        options = ["--quiet", "--no-deps", "--disable-pip-version-check", "--retries", "1", "--only-binary", ":all:"]
        installed = subprocess.run(
            [*pip, "install", *options, *PACKAGES], capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        if installed.returncode:
            pytest.skip(f"tritonserver: pip cannot install {PACKAGES[0]}: {installed.stderr.strip()[-200:]}")
        triton = site_packages(temporary) / "pytriton" / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stub = Path("python_backend_stubs") / version / "triton_python_backend_stub"
        if not (triton / stub).is_file():
            pytest.skip(f"tritonserver: nvidia-pytriton has no Python backend for Python {version}")
        (triton / "backends" / "python" / stub.name).symlink_to(Path("..") / ".." / stub)
        try:
            temporary.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process of this run was first
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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

        def is_ready() -> bool:
            assert self.process.poll() is None, said()
            with suppress(OSError):
                self.get("/v2/health/ready")
                return True
            return False

        def said() -> str:
            return f"not ready:\n{self.log.read_text(errors='replace')[-4000:]}"

        until(is_ready, said)

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
        until(lambda: self.reading(name) == value, lambda: f"{name}: expected {value}, found {self.reading(name)}")

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
