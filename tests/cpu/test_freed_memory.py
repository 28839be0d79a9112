# SPDX-License-Identifier: Apache-2.0
"""Page faults of a process that asks for the same memory again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_trt.cpu.freed_memory import USERS_OWN, keep_freed_memory
from dflash_trt.kvcache.page_tensor import zeros

FAULTS = """
import resource
import threading
import numpy as np
from dflash_trt.cpu.freed_memory import give_back_freed_memory, keep_freed_memory

def step():
    blocks = [np.ones(2**20, np.uint8) for _ in range(100)]  # glibc trims what is freed of so many
    b"1" * (80 * 2**20)  # more than it takes from any heap by itself, or has in that of a thread

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

is_given_back = give_back_freed_memory()
loading = [faults() for _ in range(3)][-1]
is_kept = keep_freed_memory()
deciding = threading.Thread(target=lambda: print(is_given_back and is_kept, loading, [faults() for _ in range(3)][-1]))
deciding.start()
deciding.join()
"""
PAGE = 4096
PAGES = 180 * 2**20 // PAGE


def run(monkeypatch: pytest.MonkeyPatch, **chosen: str) -> tuple[str, int, int]:
    """Whether it could be chosen, and page faults of the same work while models load and after that, on a thread."""
    for name in USERS_OWN:
        monkeypatch.delenv(name, raising=False)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    printed = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True).stdout.split()
    return printed[0], int(printed[1]), int(printed[2])


def test_what_was_freed_comes_back_without_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    is_chosen, loading, faults = run(monkeypatch)
    assert is_chosen == "True"
    assert loading > PAGES / 3, "weights would leave holes"
    assert faults < PAGES / 10


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    is_chosen, _, faults = run(monkeypatch, MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="33554432")
    assert is_chosen == "False"
    assert faults > PAGES / 3


def test_another_libc_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False


def resident(begin: int, end: int) -> float:
    """Share of the pages between two addresses that take memory."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(begin // PAGE * 8)
        entries = np.frombuffer(file.read((end - begin) // PAGE * 8), np.uint64)
    return float((entries >> 63).mean())


def test_a_cache_takes_no_kept_memory_and_leaves_none() -> None:
    """Its unwritten pages would be written with zeros there, and each that was outgrown would stay as a hole."""
    keep_freed_memory()
    num_bytes = 24 * 2**20
    np.ones(num_bytes, np.uint8)  # freed, and kept
    cache = zeros((num_bytes,), torch.uint8, torch.device("cpu"))
    begin, middle = cache.data_ptr(), cache.data_ptr() + num_bytes // 2
    assert resident(begin, middle + num_bytes // 2) == 0
    cache[: num_bytes // 2] = 1
    assert resident(begin, middle) == 1
    assert resident(middle, middle + num_bytes // 2) < 0.25, "a huge page at most"
    del cache
    assert resident(begin, middle) == 0
