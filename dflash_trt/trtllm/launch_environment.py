# SPDX-License-Identifier: Apache-2.0
"""Environment variables that launchers set: torchrun, mpiexec, trtllm-llmapi-launch.

The only list of their variables.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from dflash_trt.errors import MissingDependencyError, RankError

# Rank and number of ranks, by launcher: torchrun and compatible launchers; Open MPI; MPICH and its derivatives.
_TORCHRUN = ("RANK", "WORLD_SIZE")
_MPIEXEC = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
_TORCHRUN_JOB = "TORCHELASTIC_RUN_ID"
# torchrun's rank and size on one host, and the rendezvous address.
LOCAL_RANK, LOCAL_SIZE = "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDRESS = "MASTER_ADDR"
_LOCAL_ADDRESSES = ("127.0.0.1", "localhost", "::1")
# Variables of an mpiexec job, Open MPI's and PMI's; settings are the user's.
_MPI_JOB = ("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "OMPI_FIRST_", "OMPI_APP_CTX_", "OMPI_MCA_orte_", "ORTE_",
            "PMIX_", "PMI_")  # fmt: skip
_MPI_SETTINGS = "PMIX_MCA_"
# trtllm-llmapi-launch sets it to 1.
_TRTLLM_LAUNCH = "TLLM_SPAWN_PROXY_PROCESS"


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place in its launch."""

    rank: int
    size: int
    by_mpiexec: bool


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Reads the launcher's variables, torchrun's before mpiexec's; without a launcher, a process is alone.

    Raises RankError for values that are not numbers.
    """
    return _read(environment, _TORCHRUN, by_mpiexec=False) or read_mpi_launch(environment)


def read_mpi_launch(environment: Mapping[str, str]) -> Launch:
    """Reads mpiexec's variables only; without mpiexec, a process is alone."""
    launches = (_read(environment, names, by_mpiexec=True) for names in _MPIEXEC)
    return next((launch for launch in launches if launch is not None), Launch(0, 1, by_mpiexec=False))


def torchrun_variables(rank: int, size: int, local_rank: int, local_size: int) -> dict[str, str]:
    """Variables that torchrun sets, for libraries that read no others."""
    names = (*_TORCHRUN, LOCAL_RANK, LOCAL_SIZE)
    return dict(zip(names, map(str, (rank, size, local_rank, local_size)), strict=True))


def is_one_host(environment: Mapping[str, str]) -> bool:
    """Whether all ranks are on this host, by torchrun's variables."""
    size = environment.get(_TORCHRUN[1])
    return environment.get(LOCAL_SIZE, "") == size or environment.get(MASTER_ADDRESS) in _LOCAL_ADDRESSES


def is_torchrun(environment: Mapping[str, str]) -> bool:
    """Whether torchrun itself started this process, rather than a launcher that sets the same variables."""
    return _TORCHRUN_JOB in environment


def is_trtllm_launch(environment: Mapping[str, str]) -> bool:
    """Whether trtllm-llmapi-launch started this process."""
    return environment.get(_TRTLLM_LAUNCH) == "1"


def forget_mpi_job(environment: MutableMapping[str, str]) -> None:
    """Remove the variables of an mpiexec around this process, so that its children do not join that job."""
    for name in list(environment):
        if name.startswith(_MPI_JOB) and not name.startswith(_MPI_SETTINGS):
            del environment[name]


def import_mpi(wanted_by: str, otherwise: str = "") -> Any:
    """Import mpi4py's MPI, which joins MPI's world; MissingDependencyError where there is none."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            f"{wanted_by}: expected the package mpi4py with its MPI, found: {error}",
            hint=f"pip install mpi4py mpich{otherwise}",
        ) from None
    return MPI


def _read(environment: Mapping[str, str], names: tuple[str, str], *, by_mpiexec: bool) -> Launch | None:
    if not all(name in environment for name in names):
        return None
    try:
        rank, size = (int(environment[name]) for name in names)
    except ValueError:
        found = ", ".join(f"{name}={environment[name]}" for name in names)
        raise RankError(f"environment: expected whole numbers, found {found}") from None
    return Launch(rank, size, by_mpiexec=by_mpiexec)
