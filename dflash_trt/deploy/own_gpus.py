# SPDX-License-Identifier: Apache-2.0
"""The GPU of this machine, as deployments name it."""

from __future__ import annotations

from dflash_trt.deploy.gpus import GpuSpec, known_gpus


def own_gpu() -> GpuSpec | None:
    """The first GPU of this machine; None without a driver, and for a GPU that is not known."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        return gpu_named(str(nvml.nvmlDeviceGetName(device)), int(nvml.nvmlDeviceGetMemoryInfo(device).total))
    except nvml.NVMLError:  # no GPU, or memory shared with the CPU
        return None
    finally:
        nvml.nvmlShutdown()


def gpu_named(title: str, memory_bytes: int) -> GpuSpec | None:
    """The known GPU of NVML's name, `NVIDIA H100 80GB HBM3`; of several variants the one nearest in memory."""
    words = "".join(filter(str.isalnum, title.lower()))
    found = [gpu for gpu in known_gpus().values() if _model(gpu) in words]
    longest = max(map(len, map(_model, found)), default=0)  # GB200 contains B200
    variants = [gpu for gpu in found if len(_model(gpu)) == longest]
    return min(variants, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=None)


def _model(gpu: GpuSpec) -> str:
    return gpu.name.partition("-")[0]
