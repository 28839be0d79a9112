# SPDX-License-Identifier: Apache-2.0
"""Time that a process and its descendants used and waited for processors, from Linux's /proc (man 5 proc)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
USER_TICKS, NUM_COUNTS = 11, 4
"""Index of utime among the fields after the name, and how many counts follow: own and ended children's."""
NANOSECONDS = 1e-9


class ProcessorTime(NamedTuple):
    """Seconds, summed over threads."""

    used: float
    """User and system time, that of ended descendants included."""
    waited: float
    """Time in which a thread that lives was ready to run and had no core; 0 where the kernel does not count it."""

    def __sub__(self, earlier: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(self.used - earlier.used, max(0.0, self.waited - earlier.waited))


def processor_time(process: int) -> ProcessorTime:
    """Time of `process` and its descendants; what has gone counts 0."""
    used = waited = 0.0
    left = [process]
    while left:
        folder = Path(f"/proc/{left.pop()}")
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            for thread in (folder / "task").iterdir():
                left += map(int, (thread / "children").read_text().split())
                waited += sum(_waits(thread))
        except OSError:
            continue
        used += sum(map(int, fields[USER_TICKS : USER_TICKS + NUM_COUNTS])) / TICKS_PER_SECOND
    return ProcessorTime(used, waited)


def _waits(thread: Path) -> Iterator[float]:
    """Seconds on a run queue, which a kernel with CONFIG_SCHED_INFO counts."""
    if (counts := thread / "schedstat").exists():
        yield int(counts.read_text().split()[1]) * NANOSECONDS
