# SPDX-License-Identifier: Apache-2.0
"""GPUs of plans: names, number formats, and the GPU that CUDA would use here, queried from the driver only."""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Collection, Iterable
from ctypes import POINTER, byref, c_char, c_int

import msgspec

from dflash_trt.checkpoint.number_formats import FORMATS, FP4_SM, FP8, FP8_SM, W4A16_NVFP4
from dflash_trt.errors import BuildError, MissingDependencyError

# https://developer.nvidia.com/cuda-gpus. TensorRT-RTX also builds for 7.5, which has no BF16.
NAMES = {
    "8.0": ("a100", "a30"),
    "8.6": ("rtx3060", "rtx3070", "rtx3080", "rtx3090", "rtxa6000", "a10", "a40"),
    "8.9": ("rtx4060", "rtx4070", "rtx4080", "rtx4090", "rtx6000ada", "l4", "l40", "l40s"),
    "12.0": ("rtx5060", "rtx5070", "rtx5080", "rtx5090", "rtxpro6000"),
    "12.1": ("gb10",),
}
"""Compute capabilities that TensorRT-RTX serves, and names of GPUs that have them."""
LOWEST_SM = {"FP8": FP8_SM, "FP4": FP4_SM}


def parse_gpus(text: str) -> tuple[str, ...]:
    """'sm89,rtx5090' -> ('8.9', '12.0'), by increasing compute capability; ValueError names unknown ones."""
    return tuple(sorted({_parse(name) for name in text.split(",")}, key=sm_of))


def _parse(name: str) -> str:
    word = "".join(character for character in name.lower() if character.isalnum())
    for capability, names in NAMES.items():
        if word in (sm_name(capability), *names):
            return capability
    known = ", ".join(f"{sm_name(capability)} ({', '.join(names)})" for capability, names in NAMES.items())
    raise ValueError(
        f"expected {known}, found {name!r}; plans for other GPUs are TensorRT's own, built there by --backend tensorrt"
    )


def sm_name(capability: str) -> str:
    """'8.9' -> 'sm89'."""
    return "sm" + capability.replace(".", "")


def sm_of(capability: str) -> tuple[int, int]:
    """'8.9' -> (8, 9)."""
    major, minor = capability.split(".")
    return int(major), int(minor)


def check_served(capabilities: Iterable[str]) -> None:
    """Raises BuildError for a GPU that TensorRT-RTX does not serve."""
    for capability in capabilities:
        if capability not in NAMES:
            raise BuildError(
                f"TensorRT-RTX: expected a GPU of SM {', '.join(NAMES)}, found SM {capability}",
                hint="build with TensorRT on that GPU: --backend tensorrt",
            )


def check_precision(algorithms: Collection[str], capabilities: Iterable[tuple[int, int]] = ()) -> None:
    """Raises BuildError for weights or a cache that plans in general, or one of these GPUs, do not support."""
    if W4A16_NVFP4 in algorithms:
        raise BuildError(
            f"{W4A16_NVFP4}: expected weights that TensorRT multiplies as they are, found those that it writes out as"
            " BF16 in every pass, slower than recipe bf16",
            hint="build --recipe int4-w4a16, fp8 or nvfp4; this checkpoint is for native mode, where the server reads"
            " it: dflash-trt serve-config",
        )
    for capability in sorted(capabilities):
        for algorithm in sorted(algorithms):
            lowest = FORMATS[algorithm].lowest_sm
            if lowest is not None and capability < lowest:
                needed, found = (".".join(map(str, version)) for version in (lowest, capability))
                fitting = "fp8, " if algorithm != FP8 and capability >= FP8_SM else ""
                raise BuildError(
                    f"{algorithm}: expected a GPU of SM {needed} or newer, found SM {found}",
                    hint=f"build --recipe {fitting}int4-w4a16 or bf16",
                )


DRIVER = "libcuda.so.1"
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute, cuda.h 13.0
FIX = "run this on the GPU machine; the driver: https://www.nvidia.com/drivers"


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The properties of a GPU that a plan depends on."""

    name: str
    compute_capability: str
    """Major and minor version, such as 9.0."""
    uuid: str = ""
    """UUID of the device or MIG instance."""

    @property
    def sm(self) -> tuple[int, int]:
        """The compute capability as numbers."""
        return sm_of(self.compute_capability)


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use (CUDA_VISIBLE_DEVICES applies); MissingDependencyError without a driver."""
    cuda = _driver()
    _check(cuda.cuInit(0), "cuInit")
    count = c_int()
    _check(cuda.cuDeviceGetCount(byref(count)), "cuDeviceGetCount")
    return [_gpu(cuda, index) for index in range(count.value)]


def driver_version() -> str:
    """CUDA version of the driver, such as 13.0; MissingDependencyError without one."""
    cuda, version = _driver(), c_int()
    _check(cuda.cuDriverGetVersion(byref(version)), "cuDriverGetVersion")
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(DRIVER)
    except OSError:
        raise MissingDependencyError(f"no NVIDIA driver found ({DRIVER})", hint=FIX) from None


def gpu(index: int = 0) -> Gpu:
    """The visible GPU `index`; a fresh process uses the first. Raises MissingDependencyError if it is missing."""
    gpus = visible_gpus()
    if index < len(gpus):
        return gpus[index]
    raise MissingDependencyError(
        f"expected GPU {index}, found {len(gpus)} that this process may use", hint="look at CUDA_VISIBLE_DEVICES"
    )


def _gpu(cuda: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = c_int(), c_int(), c_int()
    name, identity = (c_char * 256)(), (c_char * 16)()
    _check(cuda.cuDeviceGet(byref(device), index), "cuDeviceGet")
    _check(cuda.cuDeviceGetName(name, len(name), device), "cuDeviceGetName")
    for value, attribute in ((major, COMPUTE_CAPABILITY_MAJOR), (minor, COMPUTE_CAPABILITY_MINOR)):
        _check(cuda.cuDeviceGetAttribute(byref(value), attribute, device), "cuDeviceGetAttribute")
    _check(cuda.cuDeviceGetUuid_v2(ctypes.cast(identity, POINTER(c_char)), device), "cuDeviceGetUuid_v2")
    return Gpu(
        name=name.value.decode(),
        compute_capability=f"{major.value}.{minor.value}",
        uuid=str(uuid.UUID(bytes=identity.raw)),
    )


def _check(status: int, call: str) -> None:
    if status != 0:
        raise MissingDependencyError(f"{DRIVER}: {call}: expected 0, found error {status}", hint=FIX)
