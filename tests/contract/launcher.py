# SPDX-License-Identifier: Apache-2.0
"""A drafter's launcher on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class HostLauncher:
    """Does at once what a stream would do later, and counts what would be launched."""

    device = torch.device("cpu")
    handle = 7

    def __init__(self) -> None:
        self.launches = 0

    @contextmanager
    def queued(self) -> Iterator[None]:
        yield

    def record(self, work: Callable[[], None], check: Callable[[], None]) -> Callable[[], None]:
        work()
        check()

        def replay() -> None:
            self.launches += 1
            work()

        return replay
