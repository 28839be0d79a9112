# SPDX-License-Identifier: Apache-2.0
"""Whether a process still runs."""

from __future__ import annotations

from pathlib import Path

from tests.waiting import until


def is_running(process: int) -> bool:
    """False for a zombie."""
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def until_ended(process: int) -> None:
    """Waits until `process` has ended."""
    until(lambda: not is_running(process))
