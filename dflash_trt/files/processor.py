# SPDX-License-Identifier: Apache-2.0
"""The processor of this machine."""

from __future__ import annotations

import platform


def cpu_model() -> str:
    """The vendor's name of the processor."""
    try:
        with open("/proc/cpuinfo") as lines:  # noqa: PTH123 - a device-like file, read line by line
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown model"
