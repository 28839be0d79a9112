# SPDX-License-Identifier: Apache-2.0
"""MPI ranks of a Triton server: one process that spawns them, or `mpirun -n N tritonserver` with a server for each."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from dflash_trt.errors import EngineError
from dflash_trt.trtllm.registration import register
from dflash_trt.trtllm.start import MODULE

# What Open MPI and PMI launchers leave in the environment of each process they start.
SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
LAUNCHER_PREFIXES = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_FIRST_", "OMPI_APP_CTX_", "OMPI_MCA_orte_", "ORTE_",
                     "PMIX_", "PMI_")  # fmt: skip
SETTINGS_PREFIX = "PMIX_MCA_"  # a user's, not the job's


def world() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    rank, size = (_integer(names, default) for names, default in ((RANK_VARIABLES, 0), (SIZE_VARIABLES, 1)))
    return rank, size


def leader_session() -> dict[str, Any]:
    """What makes tensorrt_llm.LLM use the other processes of MPI's world as its ranks; nothing where it spawns them."""
    _, size = world()
    if size == 1:
        forget_launcher()
        return {}
    communicator = import_module("mpi4py.MPI").COMM_WORLD
    session = import_module("tensorrt_llm.llmapi").MpiCommSession(comm=communicator, n_workers=size)
    return {"_mpi_session": session}


def work() -> NoReturn:
    """Runs what rank 0 sends until that ends, for the other ranks; raises EngineError then, so that no server opens."""
    communicator = import_module("mpi4py.MPI").COMM_WORLD
    with import_module("mpi4py.futures").MPICommExecutor(communicator):
        pass  # on every rank but 0, entering is working
    raise EngineError(f"rank {communicator.Get_rank()}: worked until rank 0 ended, and serves nothing itself")


def use_engine_drafter() -> None:
    """Registers our drafter in this process, and in those that it spawns.

    mpi4py imports the main module of the process that spawns into each that it starts. The Python backend has none,
    so the one that registers takes its place.
    """
    sys.modules["__main__"].__spec__ = find_spec(f"{MODULE}.__main__")
    register()


def forget_launcher() -> None:
    """Forgets an `mpirun -n 1` around the server: ranks spawned here must not take part in its job."""
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES) and not name.startswith(SETTINGS_PREFIX):
            del os.environ[name]


def _integer(names: tuple[str, ...], default: int) -> int:
    return next((int(os.environ[name]) for name in names if name in os.environ), default)
