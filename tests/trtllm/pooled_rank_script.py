# SPDX-License-Identifier: Apache-2.0
"""One rank of several, each with a pool of its own: rank 0 prints every rank's drafts, and the dense cache's."""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.trtllm.pool_schedule import decode, open_setup

SEED = 3


def proposed(engine: Path, rank: int) -> list[list[list[int]]]:
    """Drafts with the pool, whose pages lie in another order on each rank, and with the dense cache."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        setup = open_setup(engine, monkeypatch)
        workers = setup.worker("V2", pool_seed=rank), setup.worker()
        pooled, dense = ([trace.drafts for trace in decode(setup, worker, SEED)] for worker in workers)
        return [list(chain.from_iterable(drafts)) for drafts in (pooled, dense)]


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    gathered = comm.gather(proposed(Path(sys.argv[1]), comm.rank))
    if gathered is not None:
        print(json.dumps(gathered))
