# SPDX-License-Identifier: Apache-2.0
"""The session over MPI's world that rank 0 makes; real MPI, nothing of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py.futures import MPICommExecutor


class MpiCommSession:
    def __init__(self, comm: Any, n_workers: int) -> None:
        assert comm.Get_size() == n_workers
        self._workers = n_workers - 1
        self._context = MPICommExecutor(comm)
        self._pool = self._context.__enter__()

    def run_everywhere(self, task: Callable[[float], Any]) -> list[Any]:
        return list(self._pool.map(task, [0.2] * self._workers))

    def shutdown(self) -> None:
        self._context.__exit__(None, None, None)
