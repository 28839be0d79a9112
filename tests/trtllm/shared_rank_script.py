# SPDX-License-Identifier: Apache-2.0
"""One of several ranks that share a drafter, each with its heads in a pool of its own: rank 0 prints all drafts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from tests.trtllm.pool_schedule import decode, open_setup

SEED = 3
Drafts = list[list[int]]


def add_up(partial: Tensor) -> None:
    """In the order of ranks, so that all of them get the same."""
    parts = MPI.COMM_WORLD.allgather(partial.float().numpy())
    partial.copy_(torch.from_numpy(np.sum(parts, axis=0)))


def proposed(engine: Path, rank: int) -> tuple[Drafts, Drafts]:
    """The ranks' drafts, and those that one drafter would propose in the same states."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        setup = open_setup(engine, monkeypatch)
        worker = setup.worker("V2" if rank % 2 else "V1", pool_seed=rank, rank=rank, all_reduce=add_up)
        traces = decode(setup, worker, SEED)
        return [d for t in traces for d in t.drafts], [d for t in traces for d in t.expected_drafts]


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    gathered = comm.gather(proposed(Path(sys.argv[1]), comm.rank))
    if gathered is not None:
        print(json.dumps(gathered))
