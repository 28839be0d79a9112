# SPDX-License-Identifier: Apache-2.0
"""Processor time of a process and its descendants, from Linux's /proc (man 5 proc)."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
USER_TICKS, NUM_COUNTS = 11, 4
"""Index of utime among the fields after the name, and how many counts follow: own and ended children's."""


def processor_seconds(process: int) -> float:
    """User and system time of `process`, its descendants and those that ended; what has gone counts 0."""
    total, left = 0.0, [process]
    while left:
        folder = Path(f"/proc/{left.pop()}")
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            for thread in (folder / "task").iterdir():
                left += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
        total += sum(map(int, fields[USER_TICKS : USER_TICKS + NUM_COUNTS])) / TICKS_PER_SECOND
    return total
