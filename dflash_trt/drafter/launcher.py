# SPDX-License-Identifier: Apache-2.0
"""Where a drafter's work is queued: a CUDA stream and the CUDA graphs on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class Launcher(Protocol):
    """Runs work in order, behind what the caller has queued and before what it queues next."""

    device: torch.device

    @property
    def handle(self) -> int:
        """cudaStream_t."""

    def queued(self) -> AbstractContextManager[None]:
        """Within, torch's own operations are queued here as well."""

    def upload(self, values: Sequence[int], into: Tensor) -> None:
        """Copies integers to the device; the host does not wait."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Runs `work` once, then returns a call that repeats it on the same addresses."""


class CudaLauncher:
    """A stream of its own: TensorRT would synchronise on the default stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.handle: int = self._stream.cuda_stream

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Orders the stream behind the caller's, and the caller's behind it."""
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def upload(self, values: Sequence[int], into: Tensor) -> None:
        """Through pinned memory, which torch's allocator keeps until the copy has been made."""
        into.copy_(torch.tensor(values, dtype=into.dtype).pin_memory(), non_blocking=True)

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Captures a CUDA graph; the run before it lets TensorRT and kernels set themselves up."""
        with self.queued():
            work()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay
