# SPDX-License-Identifier: Apache-2.0
"""Driver, GPUs and their links, as NVML reports them: no CUDA context is made, and no TensorRT loaded."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import msgspec

NEEDED_FOR = ("TensorRT plans", "serving with TensorRT-LLM")
FIX = "run this on the GPU machine; the driver: https://www.nvidia.com/drivers"


class MachineFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a command may need."""

    name: str
    found: str | None
    """Version or description; None when it is missing."""
    needed_for: tuple[str, ...] = ()
    fix: str | None = None
    """The next command to run when it is missing."""


def gpus() -> list[MachineFinding]:
    """Driver, CUDA version, every GPU and the NVLinks among them; one missing finding without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [_missing(str(error))]
    try:
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return [
            MachineFinding(name="NVIDIA driver", found=str(pynvml.nvmlSystemGetDriverVersion())),
            MachineFinding(name="CUDA of the driver", found=f"{version // 1000}.{version % 1000 // 10}"),
            *([] if devices else [_missing("the driver reports none")]),
            *(_gpu(pynvml, index, device) for index, device in enumerate(devices)),
            *([_links(pynvml, devices)] if len(devices) > 1 else []),
        ]
    finally:
        pynvml.nvmlShutdown()


def _missing(reason: str) -> MachineFinding:
    return MachineFinding(name=f"NVIDIA GPU ({reason})", found=None, needed_for=NEEDED_FOR, fix=FIX)


def _gpu(nvml: Any, index: int, device: Any) -> MachineFinding:
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(device)
    try:
        memory = f"{nvml.nvmlDeviceGetMemoryInfo(device).total / 2**30:.0f} GiB"
    except nvml.NVMLError_NotSupported:
        memory = "memory shared with the CPU"
    found = f"{nvml.nvmlDeviceGetName(device)}, SM {major}.{minor}, {memory}"
    return MachineFinding(name=f"GPU {index}", found=found, needed_for=NEEDED_FOR)


def _links(nvml: Any, devices: list[Any]) -> MachineFinding:
    """Which GPUs reach each other over NVLink; tensor parallelism over PCIe is slow."""
    pairs = list(combinations(range(len(devices)), 2))
    apart = [pair for pair in pairs if not _is_linked(nvml, *(devices[index] for index in pair))]
    if not apart:
        found = f"all {len(pairs)} pairs of {len(devices)} GPUs"
    elif len(apart) == len(pairs):
        found = "none: the GPUs reach each other over PCIe"
    else:
        found = "not between GPUs " + ", ".join(f"{a} and {b}" for a, b in apart)
    return MachineFinding(name="NVLink", found=found, needed_for=("tensor parallelism",))


def _is_linked(nvml: Any, a: Any, b: Any) -> bool:
    try:
        status = nvml.nvmlDeviceGetP2PStatus(a, b, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except nvml.NVMLError_NotSupported:
        return False
    return bool(status == nvml.NVML_P2P_STATUS_OK)
