# SPDX-License-Identifier: Apache-2.0
"""Bytes of a drafter on TensorRT, worked out by hand and against what the drafter allocates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.engine.manifest import read_shard
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.preview import drafter_memory
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from tests.contract.launcher import HostLauncher
from tests.contract.machine import pretend
from tests.contract.recorder import VERSIONS
from tests.engine.plans.planned import executor_of, planned_drafter
from tests.engines import build
from tests.paths import FIXTURES

OPTIONS = PlanOptions(max_batch_size=3, max_seq_len=50, max_num_tokens=40, workspace_bytes=7)


def test_it_is_what_the_drafter_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "engine"
    build(FIXTURES / "tiny-gpt-oss-dflash", engine)
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    manifest = add_plans(engine, OPTIONS)
    memory = drafter_memory(manifest, OPTIONS, engine)
    drafter = planned_drafter(engine, manifest, num_slots=3)
    cache, executor = drafter.cache, executor_of(drafter)
    assert memory.cache_bytes == cache.k.nbytes + cache.v.nbytes == 3 * 64 * drafter.cache_bytes_per_token
    tensors = [*executor._context.tensors.values(), *executor._draft.tensors.values()]
    assert memory.activation_bytes == sum(tensor.nbytes for tensor in tensors)
    assert memory.weight_bytes == (engine / "model.safetensors").stat().st_size
    assert memory.workspace_bytes == 14


def test_it_is_what_a_rank_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a shard pass two streams to and fro."""
    draft, target = read_draft(FIXTURES / "tiny-gpt-oss-dflash"), read_target(FIXTURES / "tiny-gpt-oss")
    engine = tmp_path / "engine"
    build_engine(BuildOptions(draft=draft, draft_name="draft", target=target, output=engine, num_ranks=2))
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    whole = add_plans(tmp_path / "engine", OPTIONS)
    place, part = read_shard(tmp_path / "engine", whole, 1)
    executor = TensorRTExecutor(place, part, HostLauncher(), lambda partial: None)
    executor.load()
    executor.bind(*(torch.zeros(3 * 2, 2, 32, 1, 16, dtype=torch.bfloat16) for _ in range(2)))
    tensors = [*executor._context.tensors.values(), *executor._draft.tensors.values()]
    memory = drafter_memory(part, OPTIONS, place)
    assert memory.activation_bytes == sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
