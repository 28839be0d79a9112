# SPDX-License-Identifier: Apache-2.0
"""The GPU that CUDA would use in this process, asked of the driver: no toolkit, no framework, no CUDA context."""

from __future__ import annotations

import ctypes
import uuid
from ctypes import POINTER, byref, c_char, c_int

import msgspec

from dflash_trt.engine.plans.plan_gpus import sm_of
from dflash_trt.errors import MissingDependencyError

DRIVER = "libcuda.so.1"
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # CUdevice_attribute, cuda.h 13.0
FIX = "run this on the GPU machine; the driver: https://www.nvidia.com/drivers"


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU as a plan depends on it."""

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
