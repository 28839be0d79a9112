# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash_trt.engine.plans.plan_process` builds one plan by TensorRT-RTX in a separate process.

The builder orders a graph's outputs by the addresses of its objects: only a process that does the same work each time
gives the same bytes. Nothing in it depends on the engine's path: it works in that directory, by file names. A builder
that crashes ends only its own process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from dflash_trt.engine.plans.compile import build_plan
from dflash_trt.engine.plans.plan import PlanOptions, profiles
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES, load_plugin, load_tensorrt
from dflash_trt.engine.signatures import Graph
from dflash_trt.errors import BuildError, DFlashError

HASHES = {"PYTHONHASHSEED": "0"}  # otherwise the layout of Python's memory changes each time
MAX_REFUSAL = 2**20
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class PlanJob(msgspec.Struct, frozen=True, kw_only=True):
    """One plan to build."""

    name: str
    """Name of the graph, for its profiles."""
    graph: Graph
    options: PlanOptions
    compute_capabilities: tuple[str, ...]
    plugin: tuple[str, str, str, str]
    """Library, name, version and namespace."""
    parent: str = msgspec.field(default_factory=lambda: f"{os.getpid():010}")
    """Process whose end ends this one; fixed width, so the serialised job has the same size every time."""


class _Refusal(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    hint: str | None


def build_apart(job: PlanJob, directory: Path, output: Path) -> None:
    """Writes the plan of a graph in `directory`; BuildError where TensorRT-RTX refuses it, or ends the process."""
    command = (sys.executable, "-P", "-m", __spec__.name if __name__ == "__main__" else __name__)
    with output.open("wb") as answer:
        result = subprocess.run(  # noqa: S603
            command, cwd=directory, env=os.environ | HASHES, input=msgspec.json.encode(job), stdout=answer, check=False
        )
    if result.returncode == 0:
        return
    try:
        with output.open("rb") as answer:
            refusal = msgspec.json.decode(answer.read(MAX_REFUSAL), type=_Refusal)
    except msgspec.DecodeError:
        code = result.returncode
        ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        title = RUNTIMES[job.options.runtime].title
        raise BuildError(
            f"{job.graph.file}: expected a plan, found that {title} ended its process {ended} (messages above)"
        ) from None
    finally:
        output.unlink()
    raise BuildError(refusal.message, hint=refusal.hint)


def _refuse(descriptor: int, refused: DFlashError) -> NoReturn:
    """Writes the reason in the place of what was written of the plan, and ends the process."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, msgspec.json.encode(_Refusal(message=refused.message, hint=refused.hint)), 0)
    sys.stderr.flush()
    os._exit(1)


def main() -> None:
    """Writes the plan that standard input describes to standard output; on failure, writes the reason as JSON and exits
    with 1.
    """
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=PlanJob)
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries goes to stderr
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(job.parent):
        sys.exit(1)
    try:
        trt = load_tensorrt(job.options.runtime)
        library, *names = job.plugin
        load_plugin(trt, Path(library), *names)
        build_plan(
            trt, Path(), job.graph, profiles(job.name, job.options), job.options,
            compute_capabilities=job.compute_capabilities, plugin=None, timing_cache=None, output=answer,
        )  # fmt: skip
        answer.close()
    except DFlashError as refused:
        _refuse(answer.fileno(), refused)
    except OSError as problem:  # the disk is full
        _refuse(answer.fileno(), BuildError(f"{job.name}.plan cannot be written: {problem.strerror}"))
    os._exit(0)  # objects of the plugin's library must not outlive it


if __name__ == "__main__":
    main()
