# SPDX-License-Identifier: Apache-2.0
"""Waits: none is unbounded, and none fails because the machine is busy."""

import time
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds after which something hangs, at a load of twenty processes a core, too."""


def until(holds: Callable[[], object], what_is_known: Callable[[], object] = str) -> None:
    """Returns once `holds` is true."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what_is_known()
        time.sleep(0.005)
