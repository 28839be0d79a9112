# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torch.cuda's streams and graphs on the CPU: what is captured is replayed on the same addresses.

Replay runs the recorded operators, not the Python that called them: a value that Python chose at the capture stays. A
graph keeps alive its own memory alone, and overwrites that of graphs that the same pool got later, as it may on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dflash_trt import _C
from dflash_trt.runtime.drafter.torch import attention_node
from tests.pretend_device import MARK, PretendDevice, tensors_in

NUMBERS = count()
ACCESSES = "pretended_accesses"
"""Attribute of a storage: each stream's last call that read it, and the last that wrote it."""
FREED = 255
"""Each byte of memory that another graph may have overwritten: a NaN."""


class Stream:
    """A stream whose work is done when it is queued, but whose order with others is kept."""

    current: Stream
    done: ClassVar[dict[Stream, int]] = {}
    """Calls of each stream that the host has waited for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.cuda_stream = id(self)
        self.seen: dict[Stream, int] = {}
        """Calls of each stream that are done before this one's next call."""

    def after(self, seen: dict[Stream, int]) -> None:
        for stream, call in seen.items():
            self.seen[stream] = max(call, self.seen.get(stream, 0))

    def wait_stream(self, other: Stream) -> None:
        self.after(other.seen)

    def synchronize(self) -> None:
        for stream, call in self.seen.items():
            Stream.done[stream] = max(call, Stream.done.get(stream, 0))


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """torch.cuda.stream."""
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


class Outside(NamedTuple):
    """A tensor that a graph reads or writes and does not keep."""

    storage: weakref.ref[UntypedStorage]
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        storage = self.storage()
        assert storage is not None, "a graph is replayed whose input was freed"
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)  # type: ignore[arg-type]


class Uses:
    """How often a graph was replayed; keeps none alive."""

    replays = 0


class RecordedGraph(TorchDispatchMode):
    """The operators of a capture, with the tensors that they read and wrote."""

    current: RecordedGraph | None = None
    """The one that captures now."""
    gpu: PretendGpu | None = None
    live: ClassVar[weakref.WeakSet[RecordedGraph]] = weakref.WeakSet()
    memory: ClassVar[dict[object, list[weakref.ref[UntypedStorage]]]] = {}
    """Tensors that graphs of a pool made."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], object]] = []
        self.uses = Uses()
        self.number = next(NUMBERS)
        self.pool: object = None
        self.own: dict[int, UntypedStorage] = {}
        """Memory of its own, by address."""
        self.outside: dict[int, weakref.ref[UntypedStorage]] = {}
        """Tensors of others that it reads and writes."""
        self.changed: set[int] = set()
        """Addresses that it writes."""
        RecordedGraph.live.add(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        read = {tensor.untyped_storage().data_ptr() for tensor in tensors_of((args, kwargs))}
        for tensor in tensors_of(results):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in read and not self._is_outside(storage):
                self.own[storage.data_ptr()] = storage
                RecordedGraph.memory.setdefault(self.pool, []).append(weakref.ref(storage))
        self.add(func, args, kwargs, results)
        return results

    def add(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        """Records an operator, unless it only shows what is there."""
        schema, operands = getattr(func, "_schema", None), tensors_of((args, kwargs))
        writes = schema is None or any(x.alias_info is not None and x.alias_info.is_write for x in schema.arguments)
        read = {tensor.untyped_storage().data_ptr() for tensor in operands}
        if writes:
            self.changed.add(operands[0 if schema else -1].untyped_storage().data_ptr())  # the kernel's output is last
            results = None
        elif all(tensor.untyped_storage().data_ptr() in read for tensor in tensors_of(results)):
            return
        self.work.append(again(func, *(tree_map(self._kept, values) for values in (args, kwargs, results))))

    def _is_outside(self, storage: UntypedStorage) -> bool:
        ref = self.outside.get(storage.data_ptr())
        return ref is not None and ref() is storage

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() in self.own:
            return value
        self.outside[storage.data_ptr()] = weakref.ref(storage)
        return Outside(weakref.ref(storage), value.dtype, value.storage_offset(), value.shape, value.stride())

    def replay(self) -> None:
        """Runs them again."""
        self.uses.replays += 1
        if self.gpu is not None:
            outside = [storage for ref in self.outside.values() if (storage := ref())]
            changed = [storage for storage in outside if storage.data_ptr() in self.changed]
            self.gpu.used([*outside, *self.gpu.reads_caches()], [*changed, *self.own.values()])
        with torch._C.DisableTorchFunction(), torch.no_grad():
            for work in self.work:
                work()
        for graph in RecordedGraph.live:
            if graph.pool == self.pool and graph.number > self.number:
                for storage in graph.own.values():
                    storage.fill_(FREED)  # type: ignore[attr-defined]  # torch's stub lacks it


def again(func: Any, args: Any, kwargs: Any, results: Any) -> Callable[[], object]:
    """Replays the operator: writes to the tensors that it returned at the capture."""

    def there(values: Any) -> Any:
        return tree_map(lambda x: x.tensor() if isinstance(x, Outside) else x, values, is_leaf=is_outside)

    def call() -> Any:
        return func(*there(args), **there(kwargs))

    def overwrite() -> None:
        for old, new in zip(tensors_of(there(results)), tensors_of(call()), strict=True):
            old.copy_(new)

    return call if results is None else overwrite


def is_outside(value: object) -> bool:
    return isinstance(value, Outside)


def tensors_of(results: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]


@contextmanager
def capture(graph: RecordedGraph, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
    """torch.cuda.graph, in the order of its arguments."""
    assert capture_error_mode == "thread_local"
    assert Stream.current is stream, "torch waits for the device that is current before, and may leave the stream so"
    if all(other.pool != pool for other in RecordedGraph.live):  # torch asserts it (CUDACachingAllocator.cpp)
        assert all(ref() is None for ref in RecordedGraph.memory.get(pool, ())), "a pool outlives its graphs"
        RecordedGraph.memory[pool] = []
    graph.pool = pool
    RecordedGraph.current = graph
    with on(stream), graph:
        yield
    RecordedGraph.current = None


def attention_reference(*call: Any) -> None:
    """The plugin's reference; no operator of torch, so it is recorded here."""
    _C.kv_injection_attention_reference(*call)
    if RecordedGraph.current is not None:
        RecordedGraph.current.add(_C.kv_injection_attention_reference, call, {}, None)


class Kernels:
    """`_C`, with a reference that captures see."""

    kv_injection_attention_reference = staticmethod(attention_reference)

    def __getattr__(self, name: str) -> Any:
        return getattr(_C, name)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Uses]:
    """Puts it in the place of torch.cuda; uses of the graphs that are made from then on."""
    graphs: list[Uses] = []

    def make() -> RecordedGraph:
        graph = RecordedGraph()
        graphs.append(graph.uses)
        return graph

    Stream.current, Stream.done = Stream(), {}
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(attention_node, "_C", Kernels())
    return graphs


class PretendGpu(PretendDevice):
    """A GPU with streams, whose order is checked, and graphs, in whose capture nothing may wait."""

    def __init__(self) -> None:
        super().__init__()
        self.sync_debug_mode: str | int = 0
        self.waits: list[str] = []
        """Functions in which the host waited."""
        self.caches: list[Tensor] = []
        """Tensors that attention reads by address."""

    def wait(self, name: str) -> None:
        """RuntimeError where torch refuses it."""
        if RecordedGraph.current is not None or self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {name}")
        self.waits.append(name)
        Stream.current.synchronize()

    def called(self, function: Callable[..., Any], args: Sequence[Any], keywords: Any, result: Any) -> None:
        """Reads the operands, and writes what is new, or changed in place."""
        name = function.__name__
        operands = {id(x.untyped_storage()): x.untyped_storage() for x in tensors_in([args, keywords])}
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        changed = {id(x.untyped_storage()) for x in tensors_in(args[:1])} if in_place else set()
        made = (x.untyped_storage() for x in tensors_in([result]) if id(x.untyped_storage()) not in operands)
        read = [storage for key, storage in operands.items() if key not in changed]
        self.used(read, [*made, *(operands[key] for key in changed)])

    def used(self, read: Iterable[UntypedStorage], written: Iterable[UntypedStorage]) -> None:
        """A call on the current stream; AssertionError where another stream may still write, or read what it writes."""
        if RecordedGraph.current is not None:
            return
        stream = Stream.current
        stream.after(Stream.done)
        now = stream.seen[stream] = stream.seen.get(stream, 0) + 1
        for is_write, storages in enumerate((read, written)):
            for storage in storages:
                if not hasattr(storage, MARK):
                    continue
                if not hasattr(storage, ACCESSES):
                    setattr(storage, ACCESSES, {})
                accesses = getattr(storage, ACCESSES)
                for other, calls in accesses.items():
                    assert max(calls if is_write else calls[1:]) <= stream.seen.get(other, 0), "streams race"
                accesses.setdefault(stream, [0, 0])[is_write] = now

    def reads_caches(self) -> list[UntypedStorage]:
        return [cache.untyped_storage() for cache in self.caches]


class GpuKernels:
    """`_C` as a build with CUDA has it; both kernels compute as their references do."""

    def __init__(self, gpu: PretendGpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(_C, name)

    def cuda_architectures(self) -> list[str]:
        return ["90a"]

    def kv_injection_attention_workspace_bytes(self, *_: Any) -> int:
        return 64

    def kv_injection_attention(self, sizes: Any, tensors: list[Tensor], out: Tensor, *rest: Any) -> None:
        workspace, stream = rest
        self._check([*tensors, out, workspace], stream)
        attention_reference(sizes, tensors, out)
        self._gpu.used([x.untyped_storage() for x in tensors] + self._gpu.reads_caches(), [out.untyped_storage()])

    def kv_injection_append(self, *call: Any) -> None:
        *tensors, stream = call
        self._check(tensors, stream)
        _C.kv_injection_append_reference(*tensors)
        self._gpu.caches = tensors[3:]
        self._gpu.used([x.untyped_storage() for x in tensors[:3]], self._gpu.reads_caches())

    def _check(self, tensors: Sequence[Tensor], stream: int) -> None:
        assert {self._gpu.place(tensor) for tensor in tensors} == {self._gpu.device}
        assert stream == Stream.current.cuda_stream


def histc(of_floats: Callable[..., Tensor], x: Tensor, **keywords: Any) -> Tensor:
    """A GPU's counts integers, too."""
    return of_floats(x.float(), **keywords).to(x.dtype)


@contextmanager
def opened(file: Path, framework: str, device: str) -> Iterator[SimpleNamespace]:
    """safetensors' safe_open."""
    with safe_open(file, framework) as tensors:
        yield SimpleNamespace(get_tensor=lambda name: tensors.get_tensor(name).to(device))


@contextmanager
def pretended_gpu() -> Iterator[tuple[PretendGpu, list[Uses]]]:
    """An H100 with a build of its kernels, but without torch.compile; the graphs that are made on it."""
    gpu = PretendGpu()
    kernels, runtime = GpuKernels(gpu), "dflash_trt.runtime"
    with pytest.MonkeyPatch.context() as patch:
        graphs = stand_in(patch)
        patch.setattr("dflash_trt.device.attention_kernel._C", kernels)
        for module in ("drafter.torch.attention_node", "kvcache.context_cache"):
            patch.setattr(f"{runtime}.{module}._C", kernels)
        for module in ("device.fused", "runtime.drafter.torch_executor", "runtime.targets.huggingface"):
            patch.setattr(f"dflash_trt.{module}.why_not_compiled", lambda: "Triton")
        patch.setattr(f"{runtime}.load.choose_device", str)
        patch.setattr(torch.cuda, "synchronize", lambda device: gpu.wait("synchronize"))
        patch.setattr(torch.cuda, "empty_cache", lambda: gpu.waits.append("empty_cache"))
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (2**40, 2**40))
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.cuda, "get_sync_debug_mode", lambda: gpu.sync_debug_mode)
        patch.setattr(torch.cuda, "set_sync_debug_mode", partial(setattr, gpu, "sync_debug_mode"))
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        patch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
        for module in ("runtime.drafter.drafter", "engine.candidate_scorer"):
            patch.setattr(f"dflash_trt.{module}.safe_open", opened)
        patch.setattr(torch, "histc", partial(histc, torch.histc))
        patch.setattr(RecordedGraph, "gpu", gpu)
        with gpu:
            yield gpu, graphs
