# SPDX-License-Identifier: Apache-2.0
"""One rank of several: decodes with the drafter module, and has rank 0 print every rank's drafts.

Arguments are how (whole, pooled or shared), the engine directory and for `whole` the target.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.load import open_session
from dflash_trt.trtllm.drafter_module import EngineDrafter
from tests.fixtures_data import prompts
from tests.trtllm.pool_schedule import decode as decode_schedule
from tests.trtllm.pool_schedule import open_setup
from tests.trtllm.worker import Trace, Worker, decode, draft_config, share

BATCH, CONTEXT, STEPS, SEED = 3, 240, 6, 3
Drafts = list[list[int]]


def whole(engine: Path, target: str) -> list[list[Drafts]]:
    """Drafts and those expected, of a rank that holds the whole drafter, as engine mode replicates it."""
    session = open_session(engine, target, RuntimeOptions(max_batch_size=BATCH, device="cpu"))
    spec = session.manifest.draft
    drafter = EngineDrafter(draft_config(spec), spec, OnnxExecutor(engine, session.manifest))
    share(drafter, session.target)
    worker = Worker(drafter, max_batch=BATCH, max_ctx=CONTEXT, num_drafts=spec.num_draft_tokens)
    own = open_drafter(engine, session.manifest, num_slots=BATCH)
    traces = decode(worker, session.target, own, [ids[:60] for ids in prompts(session)[:BATCH]], STEPS)
    return [[trace.drafts, trace.expected_drafts] for trace in traces]


def pooled(engine: Path, rank: int) -> list[Drafts]:
    """Drafts with the pool, whose pages lie in another order on each rank, and with the dense cache."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        setup = open_setup(engine, monkeypatch)
        workers = setup.worker("V2", pool_seed=rank), setup.worker()
        return [_drafts(decode_schedule(setup, worker, SEED)) for worker in workers]


def shared(engine: Path, rank: int) -> list[Drafts]:
    """Drafts of ranks that share a drafter, each with its heads in a pool of its own, and those of one drafter."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        setup = open_setup(engine, monkeypatch)
        worker = setup.worker("V2" if rank % 2 else "V1", pool_seed=rank, rank=rank, all_reduce=add_up)
        traces = decode_schedule(setup, worker, SEED)
        return [_drafts(traces), [d for trace in traces for d in trace.expected_drafts]]


def add_up(partial: Tensor) -> None:
    """Sum in the order of ranks, so that all of them get the same."""
    parts = MPI.COMM_WORLD.allgather(partial.float().numpy())
    partial.copy_(torch.from_numpy(np.sum(parts, axis=0)))


def _drafts(traces: list[Trace]) -> Drafts:
    return [drafts for trace in traces for drafts in trace.drafts]


if __name__ == "__main__":
    how, engine, *target = sys.argv[1:]
    rank = MPI.COMM_WORLD.rank
    mine = (
        whole(Path(engine), *target)
        if how == "whole"
        else {"pooled": pooled, "shared": shared}[how](Path(engine), rank)
    )
    gathered = MPI.COMM_WORLD.gather(mine)
    if gathered is not None:
        print(json.dumps(gathered))
