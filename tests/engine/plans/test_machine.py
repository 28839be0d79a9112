# SPDX-License-Identifier: Apache-2.0
"""The GPUs that the driver reports, with a driver of a few lines in libcuda's place."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_trt.engine.plans import machine
from dflash_trt.engine.plans.machine import Gpu, gpu, visible_gpus
from dflash_trt.errors import MissingDependencyError
from tests.checkpoint.samples import refusal

# Signatures: cuda.h 13.0.
CUDA = """
#include <stdio.h>
#include <string.h>
int cuInit(unsigned int flags) { return flags != 0 ? 1 : STATUS; }
int cuDeviceGetCount(int* count) { *count = COUNT; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 10 + ordinal; return 0; }
int cuDeviceGetName(char* name, int length, int device) {
  snprintf(name, length, "GPU of handle %d", device);
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 75 ? device : attribute == 76 ? 3 : -1;
  return 0;
}
int cuDeviceGetUuid_v2(char* uuid, int device) { memset(uuid, device, 16); return 0; }
"""


def driver(directory: Path, monkeypatch: pytest.MonkeyPatch, *, count: int, status: int = 0) -> None:
    source, library = directory / "cuda.c", directory / f"libcuda-{count}-{status}.so"
    source.write_text(CUDA)
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    define = [f"-DCOUNT={count}", f"-DSTATUS={status}"]
    subprocess.run([compiler, "-shared", "-fPIC", *define, "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(machine, "DRIVER", str(library))


def test_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, count=2)
    first = Gpu(name="GPU of handle 10", compute_capability="10.3", uuid="0a0a0a0a-0a0a-0a0a-0a0a-0a0a0a0a0a0a")
    assert visible_gpus()[0] == gpu() == first
    assert gpu(1).name == "GPU of handle 11"
    message = refusal(lambda: gpu(2), MissingDependencyError)
    assert "expected GPU 2, found 2 that this process may use\nhint: look at CUDA_VISIBLE_DEVICES" in message


def test_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, count=0)
    assert visible_gpus() == []
    assert "expected GPU 0, found 0" in refusal(gpu, MissingDependencyError)


def test_a_driver_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, monkeypatch, count=1, status=100)
    assert "cuInit: expected 0, found error 100" in refusal(visible_gpus, MissingDependencyError)


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DRIVER", "libcuda-of-nobody.so.1")
    message = refusal(visible_gpus, MissingDependencyError)
    assert "no NVIDIA driver found (libcuda-of-nobody.so.1)" in message
    assert "https://www.nvidia.com/drivers" in message
