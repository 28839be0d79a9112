# SPDX-License-Identifier: Apache-2.0
"""What a step frees is kept for the next one, and what models free while they load is not.

glibc gives freed memory back to the system: large blocks at once, the rest when 128 KiB to 64 MiB at the heap's end
are free. A decode step frees and asks for the same tensors again and again, and each page that comes back from the
system is a page fault and zeros: at batch 32 with blocks of 8, 15 MB and a third of the step of a small target, and two
tables of logits of 39 MB at Qwen3-0.6B's shape, batch 4. Weights are another matter: they are freed as they are
converted and laid out, in sizes that do not come again.
"""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -3, -4, -8  # malloc.h of glibc
DEFAULT_MMAP_MAX = 65536
LOADING_BYTES = 4 * 2**20
KEPT_BYTES = 2**30
USERS_OWN = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_", "MALLOC_ARENA_MAX"),
    *("GLIBC_TUNABLES", "LD_PRELOAD"),
)
"""Whoever sets one of these has chosen."""


def give_back_freed_memory() -> bool:
    """Before models load: blocks of 4 MiB and more are mappings, which go back as they are freed.

    All threads that begin from now on share one heap: that of another thread has pieces of at most 64 MiB, and larger
    blocks cannot be kept there. False where the user has chosen, or libc is not glibc.
    """
    return _choose(
        (M_ARENA_MAX, 1),
        (M_MMAP_MAX, DEFAULT_MMAP_MAX),
        (M_MMAP_THRESHOLD, LOADING_BYTES),
        (M_TRIM_THRESHOLD, LOADING_BYTES),
    )


def keep_freed_memory() -> bool:
    """After that: the heap serves blocks of every size, and keeps up to 1 GiB at its end. False as above."""
    return _choose((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, KEPT_BYTES))


def _choose(*options: tuple[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USERS_OWN):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all(mallopt(option, value) for option, value in options)
