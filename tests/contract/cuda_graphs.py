# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch.cuda's streams and graphs on the CPU: what is captured is replayed on the same addresses.

Replay runs the recorded operators, not the Python that called them: a value that Python chose at the capture stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dflash_trt import _C
from dflash_trt.runtime.drafter.torch import attention_node


class Stream:
    """A stream whose work is done when it is queued."""

    cuda_stream = 7

    def __init__(self, device: torch.device | None = None) -> None:
        self.synchronized = 0

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None:
        self.synchronized += 1


class RecordedGraph(TorchDispatchMode):
    """The operators of a capture, with the tensors that they read and wrote."""

    current: RecordedGraph | None = None
    """The one that captures now."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], object]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        self.work.append(again(func, args, kwargs, results))
        return results

    def replay(self) -> None:
        """Runs them again."""
        self.replays += 1
        with torch.no_grad():
            for work in self.work:
                work()


def again(func: Any, args: Any, kwargs: Any, results: Any) -> Callable[[], object]:
    """What the operator does at a replay: it writes into the tensors that it returned at the capture."""
    writes = any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
    )
    if writes:
        return lambda: func(*args, **kwargs)
    read = {tensor.untyped_storage().data_ptr() for tensor in tensors_of((args, kwargs))}
    if all(tensor.untyped_storage().data_ptr() in read for tensor in tensors_of(results)):  # it shows what is there
        return lambda: None

    def overwrite() -> None:
        for there, new in zip(tensors_of(results), tensors_of(func(*args, **kwargs)), strict=True):
            there.copy_(new)

    return overwrite


def tensors_of(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


@contextmanager
def capture(graph: RecordedGraph, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
    """torch.cuda.graph, in the order of its arguments."""
    assert capture_error_mode == "thread_local"
    RecordedGraph.current = graph
    with graph:
        yield
    RecordedGraph.current = None


def attention_reference(*call: Any) -> None:
    """The plugin's reference; no operator of torch, so it is recorded here."""
    _C.kv_injection_attention_reference(*call)
    if RecordedGraph.current is not None:
        RecordedGraph.current.work.append(lambda: _C.kv_injection_attention_reference(*call))


class Kernels:
    """`_C`, with a reference that captures see."""

    kv_injection_attention_reference = staticmethod(attention_reference)

    def __getattr__(self, name: str) -> Any:
        return getattr(_C, name)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """Puts it in the place of torch.cuda; the graphs that are made from then on."""
    graphs: list[RecordedGraph] = []

    def make() -> RecordedGraph:
        graphs.append(RecordedGraph())
        return graphs[-1]

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(attention_node, "_C", Kernels())
    return graphs
