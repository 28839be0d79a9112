# SPDX-License-Identifier: Apache-2.0
"""TensorRT plans in an engine directory: their options, and what a plan file was built from and for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from dflash_trt.engine.plans.tensorrt_api import RuntimeName

Positive = Annotated[int, msgspec.Meta(ge=1)]
Version = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}(\.[0-9A-Za-z+]{1,20})*\Z")]
ComputeCapability = Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,3}\.[0-9]\Z")]
Compatibility = Literal["none", "same_compute_capability", "ampere_plus"]
DEFAULT_WORKSPACE_BYTES = 4 * 2**30
GRAPHS = ("context", "draft")


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
