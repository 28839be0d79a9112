# SPDX-License-Identifier: Apache-2.0
"""What NVML says of driver, GPUs and links, on machines that this one is not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest

from dflash_trt.cli.gpu_report import MachineFinding, gpus


def memory(handle: int) -> SimpleNamespace:
    if handle == 1:  # DGX Spark and Jetson: one memory for CPU and GPU
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return SimpleNamespace(total=139 * 2**30)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, MachineFinding]]:
    """Findings by name on a machine with `count` GPUs, where `is_linked` says which reach each other."""

    def look(count: int, is_linked: Callable[[int, int], bool] = lambda a, b: True) -> dict[str, MachineFinding]:
        shut_down = []

        def status(a: int, b: int, index: int) -> int:
            assert index == pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            if a == 6:  # a virtual GPU
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return pynvml.NVML_P2P_STATUS_OK if is_linked(a, b) else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

        for name, value in {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: shut_down.append(True),
            "nvmlSystemGetDriverVersion": lambda: "580.65.06",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
            "nvmlDeviceGetCount": lambda: count,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda handle: "NVIDIA GB10" if handle == 1 else "NVIDIA H200",
            "nvmlDeviceGetCudaComputeCapability": lambda handle: (12, 1) if handle == 1 else (9, 0),
            "nvmlDeviceGetMemoryInfo": memory,
            "nvmlDeviceGetP2PStatus": status,
        }.items():
            monkeypatch.setattr(pynvml, name, value)
        found = {finding.name: finding for finding in gpus()}
        assert len(shut_down) == 1
        return found

    return look


def test_gpus(machine: Callable[..., dict[str, MachineFinding]]) -> None:
    found = machine(2)
    assert found["NVIDIA driver"].found == "580.65.06"
    assert found["CUDA of the driver"].found == "13.2"
    assert found["GPU 0"].found == "NVIDIA H200, SM 9.0, 139 GiB"
    assert found["GPU 1"].found == "NVIDIA GB10, SM 12.1, memory shared with the CPU"


@pytest.mark.parametrize(
    ("count", "is_linked", "words"),
    [
        (4, lambda a, b: True, "all 6 pairs of 4 GPUs"),
        (4, lambda a, b: False, "none: the GPUs reach each other over PCIe"),
        (3, lambda a, b: (a, b) != (1, 2), "not between GPUs 1 and 2"),
        (8, lambda a, b: True, "not between GPUs 6 and 7"),
    ],
)
def test_links(
    count: int, is_linked: Callable[[int, int], bool], words: str, machine: Callable[..., dict[str, MachineFinding]]
) -> None:
    assert machine(count, is_linked)["NVLink"].found == words


def test_one_gpu_has_no_links(machine: Callable[..., dict[str, MachineFinding]]) -> None:
    assert "NVLink" not in machine(1)


def test_a_driver_without_gpus(machine: Callable[..., dict[str, MachineFinding]]) -> None:
    found = machine(0)
    assert found["NVIDIA GPU (the driver reports none)"].found is None
    assert found["NVIDIA driver"].found == "580.65.06"


def test_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", init)
    (gpu,) = gpus()
    assert gpu.found is None
    assert "Not Found" in gpu.name
    assert gpu.fix is not None
    assert "https://www.nvidia.com/drivers" in gpu.fix
