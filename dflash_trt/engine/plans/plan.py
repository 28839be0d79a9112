# SPDX-License-Identifier: Apache-2.0
"""TensorRT plans in an engine directory: their options and profiles, what built them, and whether they run here."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.engine.plans.machine import Gpu
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES, RuntimeName
from dflash_trt.engine.signatures import CORRELATOR, MAX_CONTEXT, PAGE_SIZES, Graph
from dflash_trt.errors import EngineError
from dflash_trt.files.command import quoted

Positive = Annotated[int, msgspec.Meta(ge=1)]
Version = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}(\.[0-9A-Za-z+]{1,20})*\Z")]
ComputeCapability = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,3}\.[0-9]\Z")]
Compatibility = Literal["none", "same_compute_capability", "ampere_plus"]
DEFAULT_WORKSPACE_BYTES = 4 * 2**30
SMALLEST_ROWS = 16  # context rows of a decode step with few requests; below, only launch overhead is left
MOST_PAGES = MAX_CONTEXT // PAGE_SIZES[0]
COARSE_ROWS = 256  # up to here weights are what a GEMM waits for, so that padding to the next power of 4 is free
# Ranges, not fixed shapes: findings/tensorrt_rtx_holds_the_weights_of_fixed_shapes_twice.sh
RTX_PROFILES = 4  # TensorRT-RTX compiles the kernels of each on the GPU, at the first start


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes that plans serve, and how they are built."""

    max_batch_size: Positive = 8
    """Blocks of one draft pass, and slots of the context cache."""
    max_seq_len: Positive = 8192
    """Context rows of a slot in our own cache; plans read pages from any cache."""
    max_num_tokens: Positive = 2048
    """T: context rows of one injection; more are injected in parts."""
    workspace_bytes: Positive = DEFAULT_WORKSPACE_BYTES
    hardware_compatibility: Compatibility = "none"
    """none: plans for exactly the GPU model they were built on."""
    version_compatible: bool = False
    """Plans for later TensorRT versions of the same major, too; the plugin is embedded in them."""
    runtime: RuntimeName = "tensorrt"
    """TensorRT that builds the plans and runs them."""
    compute_capabilities: tuple[ComputeCapability, ...] = ()
    """GPUs that TensorRT-RTX builds for; empty: this machine's GPU."""

    def changed(self, **changes: Any) -> PlanOptions:
        """These options with `changes`; for the other TensorRT, without options that only this one has."""
        if changes.get("runtime", self.runtime) != self.runtime:
            changes = {
                "hardware_compatibility": "none",
                "version_compatible": False,
                "compute_capabilities": (),
            } | changes
        return msgspec.structs.replace(self, **changes)


def num_workspaces(spec: PartialDraftSpec) -> int:
    """Plans of one rank that take scratch memory: context, draft, of which segments share it, and correlator."""
    return 2 if spec.lilicorr is None else 3


class Range(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of a dynamic axis: any from min to max, tuned for opt."""

    min: int
    opt: int
    max: int


Profile = dict[str, Range]
"""By axis: B, T, slots, pages."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One plan file: its sources, the TensorRT and plugin that built it, and the machine it is for."""

    file: str
    made_from: dict[str, str]
    """sha256 of the graph and of the weight files it points into, by name."""
    runtime: RuntimeName
    version: Version
    """Release of that TensorRT."""
    gpu: str | None
    """Model on which TensorRT chose its kernels; TensorRT-RTX chooses them where the plan runs."""
    compute_capabilities: tuple[ComputeCapability, ...]
    """GPUs it was built for."""
    plugin_sha256: str | None
    """sha256 of the plugin's host code, or of the library that the plan carries; None for a plan without the plugin."""
    workspace_bytes: int
    hardware_compatibility: Compatibility
    version_compatible: bool
    profiles: tuple[Profile, ...]

    @property
    def needs_plugin(self) -> bool:
        """Whether the plugin library must be loaded before the plan."""
        return self.plugin_sha256 is not None and not self.version_compatible


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


def graph_batch_sizes(largest: int) -> list[int]:
    """Batch sizes of TensorRT-LLM's CUDA graphs (llmapi/llm_args.py, CudaGraphConfig, padded), and the largest."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(192, largest + 1, 64)]
    return sorted({size for size in sizes if size < largest} | {largest})


def profiles(graph: str, options: PlanOptions) -> tuple[Profile, ...]:
    """The profiles of a graph, by rising size; B and T are fixed in each, because shorter calls are padded.

    TensorRT's have one for each batch size of TensorRT-LLM's CUDA graphs, with kernels chosen for its size.
    """
    thin = few if options.runtime == "tensorrt_rtx" else list
    if graph == "context":
        return tuple({"T": Range(min=T, opt=T, max=T)} for T in thin(row_buckets(options.max_num_tokens)))
    batches = [{"B": Range(min=B, opt=B, max=B)} for B in thin(graph_batch_sizes(options.max_batch_size))]
    if graph == CORRELATOR:
        return tuple(batches)
    slots = options.max_batch_size + 1  # TensorRT-LLM's context arena has one more, for padding
    # Only the plugin reads the page table, so there is nothing to tune.
    table = {axis: Range(min=1, opt=1, max=size) for axis, size in (("slots", slots), ("pages", MOST_PAGES))}
    return tuple(batch | table for batch in batches)


def row_buckets(largest: int) -> list[int]:
    """16, 64, 256, 512, 1024, ... and the largest."""
    doubling = (COARSE_ROWS << i for i in range(largest.bit_length()))
    return sorted({rows for rows in (SMALLEST_ROWS, 4 * SMALLEST_ROWS, *doubling) if rows < largest} | {largest})


def few(sizes: list[int]) -> list[int]:
    """At most RTX_PROFILES of `sizes`, in about equal ratios, the smallest and the largest among them."""
    growth = (sizes[-1] / sizes[0]) ** (1 / (RTX_PROFILES - 1))
    wanted = [sizes[0] * growth**step for step in range(RTX_PROFILES)]
    return sorted({min((abs(log(size / near)), size) for size in sizes)[1] for near in wanted})


def shapes(graph: Graph, profile: Profile) -> dict[str, tuple[list[int], list[int], list[int]]]:
    """Minimum, optimum and maximum shape of every input."""
    low, best, high = ({axis: getattr(r, bound) for axis, r in profile.items()} for bound in ("min", "opt", "max"))
    return {port.name: (port.sizes(low), port.sizes(best), port.sizes(high)) for port in graph.inputs}
