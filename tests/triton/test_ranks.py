# SPDX-License-Identifier: Apache-2.0
"""Who leads and who works, by what a launcher leaves in the environment."""

from __future__ import annotations

import os
import sys

import pytest

from dflash_trt.errors import EngineError
from dflash_trt.triton import mpi_ranks
from dflash_trt.trtllm.launch_environment import read_mpi_launch
from dflash_trt.trtllm.start import check_start

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "PMIX_RANK": "3"}


def set_environment(patch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI", "ORTE_")):
            patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, (0, 1)), (OPEN_MPI, (3, 8)), ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2))],
)
def test_the_world(variables: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, variables)
    launch = read_mpi_launch(os.environ)
    assert (launch.rank, launch.size) == expected


def test_a_lone_process_forgets_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it spawns must not take part in the job of an `mpirun -n 1`; a user's settings stay."""
    alone = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMI_FD": "7", "ORTE_X": "1"}
    set_environment(monkeypatch, {**alone, "OMPI_MCA_btl": "self", "PMIX_MCA_gds": "hash"})
    assert mpi_ranks.leader_session() == {}
    left = {name for name in os.environ if name.startswith(("OMPI_", "PMI", "ORTE_"))}
    assert left == {"OMPI_MCA_btl", "PMIX_MCA_gds"}


def test_spawned_ranks_import_the_drafters_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    """What mpi4py takes for the main module is the one that registers, as the engine's own check wants it."""
    registered: list[bool] = []
    monkeypatch.setattr(mpi_ranks, "register", lambda: registered.append(True))
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(EngineError, match="expected a start that registers the drafter"):
        check_start()
    mpi_ranks.use_engine_drafter()
    check_start()
    assert registered == [True]
