# SPDX-License-Identifier: Apache-2.0
"""What a step frees is kept for the next one.

glibc gives freed memory back to the system: large blocks at once, the rest when 128 KiB to 64 MiB at the heap's end
are free. A decode step frees and asks for the same tensors again and again, and each page that comes back from the
system is a page fault and zeros: at batch 32 with blocks of 8, 15 MB and a third of the step of a small target.
"""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
MAX_MMAP_THRESHOLD = 32 * 2**20
"""glibc takes no more on 64 bits: blocks above it go back at once (mallopt(3))."""
KEPT_BYTES = 2**30
USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES", "LD_PRELOAD")
"""Whoever sets one of these has chosen."""


def keep_freed_memory() -> bool:
    """Lets this process keep up to 1 GiB that it has freed. False where the user has chosen, or libc is not glibc."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in USERS_OWN):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))
