# SPDX-License-Identifier: Apache-2.0
"""Drafters on the plans of the recorded TensorRT."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans.launcher import Launcher
from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
from dflash_trt.runtime.drafter.drafter import Drafter
from tests.contract.launcher import HostLauncher


def planned_drafter(
    engine: Path, manifest: Manifest, launcher: Launcher | None = None, *, num_slots: int = 1
) -> Drafter:
    """A drafter whose launches happen on the host."""
    executor = TensorRTExecutor(engine, manifest, launcher or HostLauncher())
    return Drafter.open(executor, manifest.draft, num_slots=num_slots)


def executor_of(drafter: Drafter) -> TensorRTExecutor:
    """The executor of `drafter`, which runs plans."""
    assert isinstance(drafter.executor, TensorRTExecutor)
    return drafter.executor
