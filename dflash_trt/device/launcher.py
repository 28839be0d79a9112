# SPDX-License-Identifier: Apache-2.0
"""The CUDA stream that a model's work is queued on, and its CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, Protocol
from weakref import WeakSet

import torch


class Launcher(Protocol):
    """Runs work in order on the caller's current stream."""

    @property
    def device(self) -> torch.device:
        """The GPU."""

    @property
    def handle(self) -> int:
        """cudaStream_t."""

    def queued(self) -> AbstractContextManager[None]:
        """Context in which torch's own operations are queued here as well."""

    def record(self, work: Callable[[], None], check: Callable[[], None] | None = None) -> Callable[[], None]:
        """Runs `work` once, then `check`, and returns a call that repeats `work` on the same addresses."""


class CudaLauncher:
    """A CUDA stream of its own: TensorRT would synchronise on the default stream."""

    def __init__(self, device: torch.device) -> None:
        """Touches no GPU yet: a missing one is reported later, in one line."""
        self._device = device
        self._pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @cached_property
    def device(self) -> torch.device:
        """The GPU by its number; "cuda" is torch's current GPU, where other libraries take the first."""
        is_current = self._device == torch.device("cuda") and torch.cuda.is_available()
        return torch.device("cuda", torch.cuda.current_device()) if is_current else self._device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    @property
    def handle(self) -> int:
        """cudaStream_t of that stream."""
        return int(self._stream.cuda_stream)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Makes the stream wait for the caller's, and the caller's for it afterwards."""
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        with torch.cuda.stream(self._stream):
            yield
        caller.wait_stream(self._stream)

    def record(self, work: Callable[[], None], check: Callable[[], None] | None = None) -> Callable[[], None]:
        """Captures a CUDA graph after one run in which TensorRT, torch.compile and kernels initialise, and `check`.

        All graphs share memory: one runs at a time, and their results lie outside.
        """
        with self.queued():  # throughout: torch reads the current device, and a failed capture stays on its stream
            work()
            self._stream.synchronize()
            if check is not None:
                check()
            if not self._graphs:  # torch refuses a pool whose graphs are gone while a tensor lies in it
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                work()
            self._graphs.add(graph)
        return partial(_replay, graph, work)


def _replay(graph: torch.cuda.CUDAGraph, work: Callable[[], None]) -> None:
    """Replays the graph. `work` keeps the weights alive, which a graph does not: caches would take their memory."""
    graph.replay()


class EagerLauncher:
    """Runs work on a CPU at once."""

    device = torch.device("cpu")
    handle = 0

    def queued(self) -> AbstractContextManager[None]:
        """An empty context: there is no other queue."""
        return nullcontext()

    def record(self, work: Callable[[], None], check: Callable[[], None] | None = None) -> Callable[[], None]:
        """`work` itself."""
        return work


class CurrentStreamLauncher:
    """Torch's current stream, on which TensorRT-LLM's executor captures CUDA graphs of its own."""

    @cached_property
    def device(self) -> torch.device:
        """Torch's current GPU when this is first asked."""
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def handle(self) -> int:
        """cudaStream_t of the stream that is current now."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def queued(self) -> AbstractContextManager[None]:
        """An empty context: this is the caller's stream."""
        return nullcontext()

    def record(self, work: Callable[[], None], check: Callable[[], None] | None = None) -> Callable[[], None]:
        """`work` itself, after a first run in which TensorRT and the plugin initialise outside any capture."""
        work()
        if check is not None:
            check()
        return work
