# SPDX-License-Identifier: Apache-2.0
"""Whether a plan runs here: on this GPU, with this TensorRT and this plugin."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.engine.plans.machine import Gpu
from dflash_trt.engine.plans.plan import Plan
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES, RuntimeName
from dflash_trt.errors import EngineError
from dflash_trt.files.command import quoted


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """This process, as a plan depends on it."""

    runtime: RuntimeName
    version: str
    gpu: Gpu
    plugin_sha256: str | None
    """Hash of what is here, as Plan has that of what it was built with."""


def check_plan(plan: Plan, directory: Path, sha256: dict[str, str], here: Here) -> None:
    """Raises EngineError, naming both sides, when `plan` does not fit its directory's files or this machine."""
    gpu = here.gpu
    model = f" ({plan.gpu})" if plan.gpu else ""
    built = f"SM {', '.join(plan.compute_capabilities)}{model} with {RUNTIMES[plan.runtime].title} {plan.version}"
    found = f"SM {gpu.compute_capability} ({gpu.name}) with {RUNTIMES[here.runtime].title} {here.version}"
    rebuild = f"rebuild: dflash-trt build --plans-for {quoted(directory)}"
    for name, expected in plan.made_from.items():
        if (actual := sha256.get(name)) != expected:
            raise EngineError(
                f"{directory / plan.file}: built from {name}: expected sha256 {expected}, found {actual}", hint=rebuild
            )
    if not is_served(plan, here):
        raise EngineError(f"{directory / plan.file}: built for {built}: expected it here, found {found}", hint=rebuild)
    if plan.needs_plugin and plan.plugin_sha256 != here.plugin_sha256:
        raise EngineError(
            f"{directory / plan.file}: expected the plugin it was built with, host code sha256 {plan.plugin_sha256},"
            f" found {here.plugin_sha256}",
            hint=rebuild,
        )


def is_served(plan: Plan, here: Here) -> bool:
    """Whether `plan` runs on this GPU with this TensorRT."""
    built, version, gpu = _numbers(plan.version), _numbers(here.version), here.gpu
    is_version_served = built == version or (plan.version_compatible and built[0] == version[0] and built <= version)
    match plan.hardware_compatibility:
        case "none":
            is_gpu_served = plan.gpu in (None, gpu.name) and gpu.compute_capability in plan.compute_capabilities
        case "same_compute_capability":
            is_gpu_served = gpu.compute_capability in plan.compute_capabilities
        case "ampere_plus":
            is_gpu_served = gpu.sm >= (8, 0)
    return plan.runtime == here.runtime and is_gpu_served and is_version_served


def _numbers(version: str) -> tuple[int, ...]:
    """'10.15.1.29' -> (10, 15, 1, 29); a suffix such as .post1 does not count."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())
