# SPDX-License-Identifier: Apache-2.0
"""One rank of several: decodes with the drafter module, and has rank 0 print every rank's drafts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mpi4py import MPI

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.session import open_session
from dflash_trt.trtllm.drafter_module import EngineDrafter
from tests.fixtures_data import prompts
from tests.trtllm.decoding import decode
from tests.trtllm.worker import Worker, draft_config, share

BATCH, CONTEXT, STEPS = 3, 240, 6


def proposed(engine: Path, target: str) -> list[list[list[int]]]:
    """Drafts and those expected, of a rank that holds the whole drafter, as engine mode replicates it."""
    session = open_session(engine, target, RuntimeOptions(max_batch_size=BATCH, device="cpu"))
    spec = session.manifest.draft
    drafter = EngineDrafter(draft_config(spec), spec, OnnxExecutor(engine, session.manifest))
    share(drafter, session.target)
    worker = Worker(drafter, max_batch=BATCH, max_ctx=CONTEXT, num_drafts=spec.num_draft_tokens)
    own = open_drafter(engine, session.manifest, num_slots=BATCH)
    traces = decode(worker, session.target, own, [ids[:60] for ids in prompts(session)[:BATCH]], STEPS)
    return [[trace.drafts, trace.expected_drafts] for trace in traces]


if __name__ == "__main__":
    gathered = MPI.COMM_WORLD.gather(proposed(Path(sys.argv[1]), sys.argv[2]))
    if gathered is not None:
        print(json.dumps(gathered))
