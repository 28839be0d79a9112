# SPDX-License-Identifier: Apache-2.0
"""A machine with TensorRT, a GPU and the plugin library, as far as running plans asks for them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dflash_trt.engine.plans import add_plans, machine
from dflash_trt.engine.plans.machine import Gpu
from dflash_trt.engine.plans.plan import profiles as profiles_of
from dflash_trt.engine.plans.plan_process import PlanJob
from dflash_trt.engine.plans.tensorrt_api import host_code, installed_library
from tests.contract.host_runtime import PACKAGES, HostRuntime, plan_of

H200 = Gpu(name="NVIDIA H200", compute_capability="9.0", uuid="00000000-0000-0000-0000-000000000001")
B300 = Gpu(name="NVIDIA B300", compute_capability="10.3", uuid="00000000-0000-0000-0000-000000000002")
RTX_5090 = Gpu(name="NVIDIA GeForce RTX 5090", compute_capability="12.0", uuid="00000000-0000-0000-0000-000000000003")


def pretend(monkeypatch: pytest.MonkeyPatch, directory: Path, version: str, gpu: Gpu = H200) -> HostRuntime:
    """From now on, this machine is one: plans that it writes are executed by ONNX Runtime."""
    host = HostRuntime(version)
    monkeypatch.setitem(sys.modules, PACKAGES.get(version, "tensorrt"), host)
    monkeypatch.setattr(machine, "gpu", lambda index=0: gpu)
    monkeypatch.setattr(machine, "driver_version", lambda: "13.0")
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(installed_library()))

    def build_plan(
        trt: Any, directory: Path, graph: Any, profiles: Any, options: Any, *, output: BinaryIO, **others: Any
    ) -> None:
        output.write(plan_of(directory, graph, profiles, options))

    def build_apart(job: PlanJob, directory: Path, output: Path) -> None:
        output.write_bytes(plan_of(directory, job.graph, profiles_of(job.name, job.options), job.options))

    monkeypatch.setattr(add_plans, "build_plan", build_plan)
    monkeypatch.setattr(add_plans, "build_apart", build_apart)
    return host


def another_plugin(directory: Path) -> Path:
    """The plugin library with another hash of its host code."""
    library = directory / "libanother.so"
    content, digest = installed_library().read_bytes(), host_code(installed_library()).encode()
    library.write_bytes(content.replace(digest, digest[::-1]))
    return library
