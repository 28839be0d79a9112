# SPDX-License-Identifier: Apache-2.0
"""A machine with TensorRT, a GPU and the plugin library, as far as our code asks for them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dflash_trt.engine.plans import machine
from dflash_trt.engine.plans.machine import Gpu
from tests.contract.recorder import Recorder

H200 = Gpu(name="NVIDIA H200", compute_capability="9.0", uuid="00000000-0000-0000-0000-000000000001")
B300 = Gpu(name="NVIDIA B300", compute_capability="10.3", uuid="00000000-0000-0000-0000-000000000002")


def pretend(monkeypatch: pytest.MonkeyPatch, directory: Path, version: str, gpu: Gpu = H200) -> Recorder:
    """From now on, this machine is one; the plugin library is a file of a few bytes in `directory`."""
    recorder = Recorder(version)
    monkeypatch.setitem(sys.modules, "tensorrt", recorder)
    monkeypatch.setattr(machine, "gpu", lambda index=0: gpu)
    library = directory / "libdflash_trt_plugins.so"
    if not library.exists():  # other ranks may be reading it
        library.write_bytes(b"plugin")
    monkeypatch.setenv("DFLASH_TRT_PLUGIN", str(library))
    return recorder
