# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = 2_000, 10, 100
"""New objects before they are collected, how often before those that were left are, too, and then before all are."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Leaves what is loaded out of collections, which take 0.2 s over a model, and starts them later than Python does.

    A step of 256 streams makes some thousand objects and drops them at once. At Python's thresholds, 700, 10, 10, they
    cause a full collection each second, which holds all streams for 10 to 40 ms.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()  # nanobind reports uncollected objects as leaks on stderr
