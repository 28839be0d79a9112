# SPDX-License-Identifier: Apache-2.0
"""Which drafter runs an engine, and why none does."""

from __future__ import annotations

from pathlib import Path

import msgspec
import onnxruntime
import pytest
import torch

from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans.launcher import CudaLauncher
from dflash_trt.engine.plans.plan import Plan
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.errors import MissingDependencyError
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
from dflash_trt.runtime.drafter.open import choose_executor, open_drafter
from tests.checkpoint.samples import refusal
from tests.contract.machine import pretend
from tests.contract.recorder import VERSIONS
from tests.engines import build

PLAN = Plan(
    file="draft.plan", made_from={}, tensorrt=VERSIONS[0], gpu="NVIDIA H200", compute_capability="9.0",
    plugin_sha256=None, workspace_bytes=1, hardware_compatibility="none", version_compatible=False, profiles=(),
)  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return tmp_path / "engine"


@pytest.fixture
def manifest(draft_dir: Path, engine: Path) -> Manifest:
    return build(draft_dir, engine)


@pytest.fixture
def planned(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, plans={"context": PLAN, "draft": PLAN})


def providers(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [*names, "CPUExecutionProvider"])


def test_onnx_runtime_on_a_cpu(engine: Path, manifest: Manifest) -> None:
    drafter = open_drafter(engine, manifest, num_slots=3, device="cpu", expose=["layers.0/output"])
    executor = drafter.executor
    assert isinstance(executor, OnnxExecutor)
    assert len(drafter.cache.lengths) == 3
    assert [output.name for output in executor._sessions["draft"].get_outputs()] == ["hidden", "layers.0/output"]


def test_onnx_runtime_on_a_gpu_that_it_knows(engine: Path, planned: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    providers(monkeypatch, "CUDAExecutionProvider")
    executor = choose_executor(engine, planned, device="cuda:1", expose=("a",))
    assert isinstance(executor, OnnxExecutor)
    assert (executor.device, executor._expose) == (torch.device("cuda:1"), ("a",))


def test_plans_where_onnx_runtime_has_no_gpu(
    engine: Path, planned: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    providers(monkeypatch)
    executor = choose_executor(engine, planned, device="cuda:1")
    assert isinstance(executor, TensorRTExecutor)
    assert executor.device == torch.device("cuda:1")
    assert isinstance(executor._launcher, CudaLauncher)


def test_the_reason_why_nothing_runs_it(
    engine: Path, manifest: Manifest, planned: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers(monkeypatch)

    def message(of: Manifest, expose: tuple[str, ...] = ()) -> str:
        return refusal(lambda: choose_executor(engine, of, device="cuda", expose=expose), MissingDependencyError)

    without_plans = message(manifest)
    assert without_plans.startswith(f"{engine}: expected a drafter for cuda, found none: onnxruntime ")
    assert "has no CUDAExecutionProvider but CPUExecutionProvider; the engine has no TensorRT plans" in without_plans
    assert f"dflash-trt build --plans-for {engine}" in without_plans
    assert "expected the package tensorrt 10.15 or newer, found" in message(planned)
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    assert "TensorRT plans do not return layers.0/output" in message(planned, ("layers.0/output",))
    half = msgspec.structs.replace(planned, plans={"draft": PLAN})
    assert "the engine has no TensorRT plans" in message(half)
