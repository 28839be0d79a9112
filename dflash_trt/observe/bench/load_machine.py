# SPDX-License-Identifier: Apache-2.0
"""The machine that sends the load."""

from __future__ import annotations

import os

from dflash_trt.files.processor import cpu_model
from dflash_trt.observe.bench.run_record import LoadMachine


def load_machine() -> LoadMachine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return LoadMachine(cpu=cpu_model(), cores=os.cpu_count() or 1, memory_gib=round(memory, 1), gpus=_gpus())


def _gpus() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return tuple(str(pynvml.nvmlDeviceGetName(handle)) for handle in handles)
