# SPDX-License-Identifier: Apache-2.0
"""Start a console command, TensorRT-LLM's or ours, in a process whose main module registers the drafter."""

from __future__ import annotations

import inspect
import runpy
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from dflash_trt.deploy.trtllm_arguments import ENGINE_MODE
from dflash_trt.errors import EngineError
from dflash_trt.trtllm.registration import register

MODULE = ENGINE_MODE[-1]
DYNAMO = "dynamo.trtllm"
"""NVIDIA Dynamo's worker around TensorRT-LLM, which has no console script."""
SESSION = "tensorrt_llm.llmapi.mpi_session"
CLIENT = "RemoteMpiCommSessionClient"
T = TypeVar("T")


def run_command(command: Sequence[str]) -> None:
    """Runs the console script `command[0]`, or dynamo.trtllm, with the rest as arguments; exits with its status."""
    if command and command[0] == DYNAMO:
        sys.argv[:] = list(command)
        runpy.run_module(DYNAMO, run_name="__main__")  # in place: sys.modules keeps the main module that registers
        sys.exit()
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    if not command or command[0] not in scripts:
        sys.exit(f"usage: {' '.join(ENGINE_MODE)} trtllm-serve|trtllm-bench|dflash-trt ARGUMENTS...")
    sys.argv[:] = list(command)
    sys.exit(scripts[command[0]].load()())


def check_start() -> None:
    """Raise EngineError where ranks would not import the registration."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name != f"{MODULE}.__main__":
        raise EngineError(
            "engine mode: expected a start that registers the drafter in every rank, found another main module",
            hint=f"{' '.join(ENGINE_MODE)} dflash-trt {shlex.join(sys.argv[1:])}",
        )


def register_in_remote_ranks() -> None:
    """Make every task register the drafter in its rank first; EngineError where tasks are sent another way.

    Ranks of trtllm-llmapi-launch import no main module but unpickle tasks. They run TensorRT-LLM's own modules
    (llmapi/mgmn_leader_node.py on rank 0, mgmn_worker_node.py on the others) and wait; the command, which is no MPI
    process, sends them functions through one method (llmapi/mpi_session.py, read on NVIDIA/TensorRT-LLM's main of
    November 2026).
    """
    client: Any = getattr(import_module(SESSION), CLIENT, None)
    submit: Any = getattr(client, "submit", lambda: None)
    found = list(inspect.signature(submit).parameters)
    if found[:3] != ["self", "task", "args"]:
        raise EngineError(f"{SESSION}.{CLIENT}.submit: expected (self, task, *args, ...), found ({', '.join(found)})")

    @wraps(submit)
    def submit_registered(self: Any, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return submit(self, partial(run_registered, task), *args, **kwargs)

    client.submit = submit_registered


def run_registered(task: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Register the drafter in this rank, then run the task."""
    register()
    return task(*args, **kwargs)
