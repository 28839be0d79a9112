# SPDX-License-Identifier: Apache-2.0
"""MPI ranks of a Triton server: one process that spawns them, or `mpirun -n N tritonserver` with a server for each."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from dflash_trt.errors import EngineError
from dflash_trt.trtllm.launch_environment import forget_mpi_job, import_mpi, read_mpi_launch
from dflash_trt.trtllm.registration import MODULE, register


def leader_session() -> dict[str, Any]:
    """Arguments that make tensorrt_llm.LLM use MPI's world as its ranks; empty where it spawns them."""
    size = read_mpi_launch(os.environ).size
    if size == 1:
        forget_mpi_job(os.environ)  # an `mpirun -n 1` around the server
        return {}
    communicator = import_mpi("started by mpirun").COMM_WORLD
    session = import_module("tensorrt_llm.llmapi").MpiCommSession(comm=communicator, n_workers=size)
    return {"_mpi_session": session}


def work() -> NoReturn:
    """Run rank 0's tasks on another rank until rank 0 ends; then raise EngineError, so that no server opens."""
    communicator = import_mpi("started by mpirun").COMM_WORLD
    with import_module("mpi4py.futures").MPICommExecutor(communicator):
        pass  # on every rank but 0, entering is working
    raise EngineError(f"rank {communicator.Get_rank()}: rank 0 has ended; this rank serves no requests itself")


def use_engine_drafter() -> None:
    """Registers our drafter in this process, and in those that it spawns.

    mpi4py imports the main module of the process that spawns into each that it starts. The Python backend has none,
    so the one that registers takes its place.
    """
    sys.modules["__main__"].__spec__ = find_spec(f"{MODULE}.__main__")
    register()
