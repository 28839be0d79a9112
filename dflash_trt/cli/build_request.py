# SPDX-License-Identifier: Apache-2.0
"""Options of `dflash-trt build` as one struct, and which of them go together."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dflash_trt.cli.options import refuse_given
from dflash_trt.engine.plans.build_checks import for_able_gpus
from dflash_trt.engine.plans.machine import NAMES
from dflash_trt.engine.plans.plan import Compatibility, PlanOptions
from dflash_trt.engine.plans.timing_cache import TimingCache

if TYPE_CHECKING:
    from dflash_trt.engine.plans.tensorrt_api import RuntimeName
    from dflash_trt.engine.proposal_head import HeadChoice

BACKENDS: dict[str, RuntimeName] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
PLAN_SETTINGS = [name for name in PlanOptions.__struct_fields__ if name != "runtime"]
TIMING = ("timing_cache", "reproducible")
NOT_RTX = "is for --backend tensorrt; TensorRT-RTX builds for a list of GPUs and chooses kernels where a plan runs"


class BuildRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Options of `build`; None where one was not given."""

    draft: str | None
    """Checkpoint or deployment."""
    plans_for: Path | None
    """Engine directory that gets plans, in place of a draft."""
    target: str | None
    output: Path | None
    force: bool
    recipe: str | None
    calibration: str
    head: HeadChoice | None
    head_tokens: Path | None
    tp: int | None
    dry_run: bool
    as_json: bool
    backend: str
    compute_capabilities: tuple[str, ...] | None
    max_batch_size: int | None
    max_seq_len: int | None
    max_num_tokens: int | None
    workspace_bytes: int | None
    hardware_compatibility: Compatibility | None
    version_compatible: bool | None
    timing_cache: Path | None
    reproducible: bool

    @property
    def runtime(self) -> RuntimeName | None:
        """TensorRT that builds plans; None leaves it to the engine, or builds none."""
        return BACKENDS.get(self.backend) or (None if self.compute_capabilities is None else "tensorrt_rtx")

    @property
    def has_plans(self) -> bool:
        """Whether plans are built now."""
        return self.runtime is not None or self.plans_for is not None

    @property
    def plan_changes(self) -> dict[str, Any]:
        """The given fields of PlanOptions."""
        given = {name: value for name in PLAN_SETTINGS if (value := getattr(self, name)) is not None}
        return given if self.runtime is None else given | {"runtime": self.runtime}

    @property
    def cache(self) -> TimingCache | None:
        """Timing cache of --timing-cache and --reproducible, if any."""
        if self.timing_cache is None:
            return None
        return TimingCache(file=self.timing_cache, reproducible=self.reproducible)


def asked_plans(options: PlanOptions | None, algorithms: Collection[str], request: BuildRequest) -> PlanOptions:
    """`options` changed as requested, without the GPUs that lack one of the `algorithms`, which stderr names."""
    options, lacking = for_able_gpus(algorithms, (options or PlanOptions()).changed(**request.plan_changes))
    for capability, reason in lacking.items():
        names = ", ".join(NAMES.get(capability, ("unknown",)))
        click.echo(f"warning: no plans for SM {capability} ({names}): {reason}", err=True)
    return options


def check_usage(request: BuildRequest) -> None:
    """Raises UsageError for options that do not go together."""
    if request.as_json and not request.dry_run:
        raise click.UsageError("--json is for --dry-run")
    if (request.draft is None) == (request.plans_for is None):
        raise click.UsageError("expected either DRAFT or --plans-for ENGINE")
    if not request.has_plans:
        refuse_given((*PLAN_SETTINGS, *TIMING), "is for --backend tensorrt")
    if request.runtime == "tensorrt":
        why = "is for --backend tensorrt-rtx; TensorRT builds for the GPU that is here"
        refuse_given(["compute_capabilities"], why)
    elif request.runtime == "tensorrt_rtx":
        refuse_given(("hardware_compatibility", "version_compatible", *TIMING), NOT_RTX)
    if request.reproducible and request.timing_cache is None:
        raise click.UsageError("--reproducible needs --timing-cache")
    is_trimmed = request.head is not None and request.head.num_tokens is not None
    if is_trimmed and request.head_tokens is None:
        raise click.UsageError("--head trim:N needs --head-tokens FILE, whose answers say which tokens are frequent")
    if request.head_tokens is not None and not is_trimmed:
        raise click.UsageError("--head-tokens is for --head trim:N")
    if request.plans_for is not None:
        names = ("target", "output", "force", "recipe", "calibration", "head", "head_tokens", "tp")
        refuse_given(names, "cannot be used with --plans-for")


def refuse_for_deployment() -> None:
    """Raises UsageError for options that a deployment file answers itself."""
    refuse_given(("recipe", "tp", "head"), "is for a draft checkpoint; CONFIG.yaml says itself what it serves")


def check_calibration(recipe: str | None, request: BuildRequest) -> None:
    """Raises UsageError for --calibration without a recipe that it is for."""
    if request.calibration != "none" and recipe is None:
        raise click.UsageError("--calibration needs a recipe")
