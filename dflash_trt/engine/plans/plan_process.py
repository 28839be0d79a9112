# SPDX-License-Identifier: Apache-2.0
"""`python -m dflash_trt.engine.plans.plan_process` builds one plan by TensorRT-RTX, in a process of its own.

The builder orders a graph's outputs by addresses: a process that does the same each time gives the same bytes, one that
has done other work before need not. And a builder that crashes ends nothing else.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from dflash_trt.engine.plans.compile import build_plan
from dflash_trt.engine.plans.plan import PlanOptions, profiles
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES, load_plugin, load_tensorrt
from dflash_trt.engine.signatures import Graph
from dflash_trt.errors import BuildError, DFlashError

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class PlanJob(msgspec.Struct, frozen=True, kw_only=True):
    """One plan to build."""

    directory: str
    name: str
    """Name of the graph, for its profiles."""
    graph: Graph
    options: PlanOptions
    compute_capabilities: tuple[str, ...]
    plugin: tuple[str, str, str, str]
    """Library, name, version and namespace."""
    output: str
    parent: int
    """Process whose end ends this one."""


class _Refusal(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    hint: str | None


def build_apart(job: PlanJob) -> None:
    """Writes `job.output`; BuildError where TensorRT-RTX refuses the graph, or ends the process."""
    command = (sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__)
    result = subprocess.run(command, input=msgspec.json.encode(job), stdout=subprocess.PIPE, check=False)  # noqa: S603
    if result.returncode == 0:
        return
    try:
        refusal = msgspec.json.decode(result.stdout.splitlines()[-1], type=_Refusal)
    except (IndexError, msgspec.DecodeError):
        code = result.returncode
        ended = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        title = RUNTIMES[job.options.runtime].title
        raise BuildError(
            f"{job.graph.file}: expected a plan, found that {title} ended its process {ended} (messages above)"
        ) from None
    raise BuildError(refusal.message, hint=refusal.hint)


def main() -> None:
    """Builds the plan that standard input describes; prints why not as JSON and exits with 1."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=PlanJob)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != job.parent:
        sys.exit(1)
    try:
        trt = load_tensorrt(job.options.runtime)
        library, *names = job.plugin
        load_plugin(trt, Path(library), *names)
        plan = build_plan(
            trt, Path(job.directory), job.graph, profiles(job.name, job.options), job.options,
            compute_capabilities=job.compute_capabilities, plugin=None, timing_cache=None,
        )  # fmt: skip
    except DFlashError as refused:
        print(msgspec.json.encode(_Refusal(message=refused.message, hint=refused.hint)).decode(), flush=True)
        sys.exit(1)
    Path(job.output).write_bytes(plan)
    os._exit(0)  # objects of the plugin's library must not outlive it


if __name__ == "__main__":
    main()
