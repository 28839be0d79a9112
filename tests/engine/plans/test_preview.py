# SPDX-License-Identifier: Apache-2.0
"""Facts about plans without TensorRT: the commands of --dry-run, profiles, and the bytes of a drafter."""

import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.device.launcher import Launcher
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.engine.manifest import Manifest, read_shard
from dflash_trt.engine.plans import tensorrt_executor
from dflash_trt.engine.plans.add_plans import add_plans
from dflash_trt.engine.plans.plan import PlanOptions, Range, graph_batch_sizes, profiles, row_buckets
from dflash_trt.engine.plans.preview import drafter_memory, trtexec_commands
from dflash_trt.engine.plans.tensorrt_api import installed_library
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.engine.plans.timing_cache import TimingCache
from dflash_trt.engine.recorded_graph import graph_tensors
from dflash_trt.runtime.drafter.drafter import Drafter
from tests.contract.host_runtime import VERSIONS
from tests.contract.launcher import HostLauncher
from tests.contract.machine import pretend
from tests.engines import build
from tests.paths import FIXTURES


def planned_drafter(
    engine: Path, manifest: Manifest, launcher: Launcher | None = None, *, num_slots: int = 1
) -> Drafter:
    """A drafter whose launches happen on the host."""
    executor = TensorRTExecutor(engine, manifest, launcher or HostLauncher())
    return Drafter.open(executor, manifest.draft, num_slots=num_slots)


def allocations(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes by address of the tensors that plans are loaded with from now on."""
    sizes: dict[int, int] = {}

    def noted(*arguments: Any) -> dict[str, Tensor]:
        tensors = graph_tensors(*arguments)
        sizes.update({tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()})
        return tensors

    monkeypatch.setattr(tensorrt_executor, "graph_tensors", noted)
    return sizes


SIZES = PlanOptions(max_batch_size=3, max_seq_len=50, max_num_tokens=40, workspace_bytes=7)


def test_it_is_what_the_drafter_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tmp_path / "engine"
    build(FIXTURES / "tiny-gpt-oss-dflash", engine)
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    manifest = add_plans(engine, SIZES)
    memory = drafter_memory(manifest, SIZES, engine)
    allocated = allocations(monkeypatch)
    drafter = planned_drafter(engine, manifest, num_slots=3)
    cache = drafter.cache
    assert memory.cache_bytes == cache.k.nbytes + cache.v.nbytes == 3 * 64 * drafter.cache_bytes_per_token
    assert memory.activation_bytes == sum(allocated.values())
    assert memory.weight_bytes == (engine / "model.safetensors").stat().st_size
    assert memory.workspace_bytes == 14


def test_it_is_what_a_rank_allocates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of a shard pass two streams to and fro."""
    draft, target = read_draft(FIXTURES / "tiny-gpt-oss-dflash"), read_target(FIXTURES / "tiny-gpt-oss")
    engine = tmp_path / "engine"
    build_engine(BuildOptions(draft=draft, draft_name="draft", target=target, output=engine, num_ranks=2))
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    whole = add_plans(tmp_path / "engine", SIZES)
    place, part = read_shard(tmp_path / "engine", whole, 1)
    allocated = allocations(monkeypatch)
    executor = TensorRTExecutor(place, part, HostLauncher(), lambda partial: None)
    executor.load()
    executor.bind(*(torch.zeros(3 * 2, 2, 32, 1, 16, dtype=torch.bfloat16) for _ in range(2)))
    assert drafter_memory(part, SIZES, place).activation_bytes == sum(allocated.values())


BATCHES = {
    1: [1], 2: [1, 2], 6: [1, 2, 4, 6], 64: [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64],
    72: [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72],  # not as 128
    300: [1, 2, 4, *range(8, 129, 8), 192, 256, 300],
}  # fmt: skip
ROWS = {
    1: [1], 16: [16], 17: [16, 17], 256: [16, 64, 256], 257: [16, 64, 256, 257], 512: [16, 64, 256, 512],
    2048: [16, 64, 256, 512, 1024, 2048],
}  # fmt: skip


def test_batches_are_those_of_the_cuda_graphs_and_rows_in_buckets() -> None:
    assert {largest: graph_batch_sizes(largest) for largest in BATCHES} == BATCHES
    assert {largest: row_buckets(largest) for largest in ROWS} == ROWS


def test_profiles_of_both_graphs() -> None:
    options = PlanOptions(max_batch_size=2, max_seq_len=100, max_num_tokens=16)
    assert profiles("context", options) == ({"T": Range(min=16, opt=16, max=16)},)
    first, second = profiles("draft", options)
    assert first["B"] == Range(min=1, opt=1, max=1)
    assert second == {
        "B": Range(min=2, opt=2, max=2),
        "slots": Range(min=1, opt=1, max=3),
        "pages": Range(min=1, opt=1, max=8192),
    }


def test_tensorrt_rtx_has_few_profiles() -> None:
    """It compiles the kernels of each where a plan starts."""
    rtx = PlanOptions(max_batch_size=64, max_num_tokens=2048, runtime="tensorrt_rtx")
    assert [profile["B"].max for profile in profiles("draft", rtx)] == [1, 4, 16, 64]
    assert [profile["T"].max for profile in profiles("context", rtx)] == [16, 64, 512, 2048]
    assert [profile["B"].max for profile in profiles("draft", rtx.changed(max_batch_size=5))] == [1, 2, 4, 5]
    assert [profile["B"].max for profile in profiles("draft", rtx.changed(max_batch_size=1))] == [1]
    assert len(profiles("draft", PlanOptions(max_batch_size=64))) == 11


OPTIONS = PlanOptions(max_batch_size=2, max_seq_len=64, max_num_tokens=100, hardware_compatibility="ampere_plus")


def commands(draft_dir: Path, engine: Path, options: PlanOptions, cache: TimingCache | None) -> list[list[str]]:
    draft = read_draft(draft_dir)
    lines = trtexec_commands(engine, draft.spec, draft.quantization, 1, options, cache)
    return [shlex.split(line) for line in lines]


def test_trtexec_commands(draft_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library, engine = tmp_path / "plugin.so", tmp_path / "engine"
    library.touch()
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(library))
    context, draft = commands(draft_dir, engine, OPTIONS, TimingCache(file=Path("t.cache")))
    common = [
        "--stronglyTyped",
        "--skipInference",
        "--profilingVerbosity=detailed",
        "--maxAuxStreams=0",
        "--memPoolSize=workspace:4096M",
    ]
    assert context[:8] == [
        "trtexec", f"--onnx={engine / 'context.onnx'}", f"--saveEngine={engine / 'context.plan'}", *common
    ]  # fmt: skip
    assert context[8:14] == [
        "--hardwareCompatibilityLevel=ampere+", "--timingCacheFile=t.cache", "--profile=0",
        *(f"--{bound}Shapes=target_hidden:16x144,positions:16" for bound in ("min", "opt", "max")),
    ]  # fmt: skip
    assert f"--dynamicPlugins={library}" in draft
    assert not any(word.startswith("--setPluginsToSerialize") for word in draft)
    assert [word for word in draft if word.startswith("--profile")] == ["--profile=0", "--profile=1"]
    assert "context_pointers:3x2,context_layout:6,page_table:1x1" in next(
        word for word in draft if word.startswith("--minShapes")
    )


def test_portable_and_reproducible(draft_dir: Path, tmp_path: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, version_compatible=True, hardware_compatibility="none")
    cache = TimingCache(file=Path("t"), reproducible=True)
    context, draft = commands(draft_dir, tmp_path / "engine", options, cache)
    library = installed_library()  # where it will be
    plugin = {f"--setPluginsToSerialize={library}", f"--dynamicPlugins={library}"}  # the first alone registers nothing
    assert {"--versionCompatible", *plugin, "--errorOnTimingCacheMiss"} <= set(draft)
    assert not plugin & set(context)
    assert not any(word.startswith("--hardwareCompatibilityLevel") for word in context)
