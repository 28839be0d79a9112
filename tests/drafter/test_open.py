# SPDX-License-Identifier: Apache-2.0
"""Which drafter runs an engine, and why none does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import onnxruntime
import pytest

from dflash_trt.drafter import onnx_drafter, tensorrt_drafter
from dflash_trt.drafter.onnx_drafter import OnnxDrafter
from dflash_trt.drafter.open import open_drafter
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plan import Plan
from dflash_trt.errors import MissingDependencyError
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


class Opened:
    """Stands where a drafter's class does, and keeps what it was made with."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.arguments, self.options = arguments, options


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_drafter, "OnnxDrafter", type("Onnx", (Opened,), {}))
    monkeypatch.setattr(tensorrt_drafter, "TensorRTDrafter", type("TensorRT", (Opened,), {}))


def providers(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [*names, "CPUExecutionProvider"])


def made(drafter: Any) -> tuple[str, tuple[object, ...], dict[str, object]]:
    return type(drafter).__name__, drafter.arguments, drafter.options


def test_onnx_runtime_on_a_cpu(engine: Path, manifest: Manifest) -> None:
    drafter = open_drafter(engine, manifest, num_slots=3, device="cpu", expose=["layers.0/output"])
    assert isinstance(drafter, OnnxDrafter)
    assert drafter._k_cache.shape[0] == 3
    assert [output.name for output in drafter._draft.get_outputs()] == ["hidden", "layers.0/output"]


@pytest.mark.usefixtures("opened")
def test_onnx_runtime_on_a_gpu_that_it_knows(engine: Path, planned: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    providers(monkeypatch, "CUDAExecutionProvider")
    options = {"num_slots": 2, "device": "cuda:1", "expose": ("a",)}
    assert made(open_drafter(engine, planned, **options)) == ("Onnx", (engine, planned), options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("opened")
def test_plans_where_onnx_runtime_has_no_gpu(
    engine: Path, planned: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    providers(monkeypatch)
    found = made(open_drafter(engine, planned, num_slots=2, device="cuda:1"))
    assert found == ("TensorRT", (engine, planned), {"num_slots": 2, "device": "cuda:1"})


@pytest.mark.usefixtures("opened")
def test_the_reason_why_nothing_runs_it(
    engine: Path, manifest: Manifest, planned: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    providers(monkeypatch)

    def message(of: Manifest, expose: tuple[str, ...] = ()) -> str:
        return refusal(lambda: open_drafter(engine, of, device="cuda", expose=expose), MissingDependencyError)

    without_plans = message(manifest)
    assert without_plans.startswith(f"{engine}: expected a drafter for cuda, found none: onnxruntime ")
    assert "has no CUDAExecutionProvider but CPUExecutionProvider; the engine has no TensorRT plans" in without_plans
    assert f"dflash-trt build {engine} --backend tensorrt" in without_plans
    assert "expected the package tensorrt 10.15 or newer, found" in message(planned)
    pretend(monkeypatch, tmp_path, VERSIONS[0])
    assert "TensorRT plans do not return layers.0/output" in message(planned, ("layers.0/output",))
    half = msgspec.structs.replace(planned, plans={"draft": PLAN})
    assert "the engine has no TensorRT plans" in message(half)
