# SPDX-License-Identifier: Apache-2.0
"""TensorRT's runtime on the host: every name, argument and enum member that is used must be in the real bindings.

Plans are JSON that name a graph; a context executes it with ONNX Runtime on the very addresses that were bound, so that
a drafter on top of it computes. Nothing here builds: that is for the real builder (test_rtx_plans.py).
"""

# mypy: disable-error-code="call-arg"

from __future__ import annotations

import ctypes
import enum
import importlib
import json
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto

from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.engine.plans.plan import PlanOptions, Profile, shapes
from dflash_trt.engine.signatures import Graph
from dflash_trt.runtime.drafter.onnxruntime.graph_session import model_session
from tests.contract.read_bindings import describe

DATA = Path(__file__).parent
VERSIONS = ("10.15.1.29", "11.4.0.106")
RTX = "1.7.1.116"
PACKAGES = {RTX: "tensorrt_rtx_bindings"}


@cache  # before a stand-in takes the module's place
def offer_of(version: str) -> dict[str, Any]:
    """API of a version's bindings, read from the module if it is installed, else from an earlier recording."""
    if version in PACKAGES:
        return describe(importlib.import_module(PACKAGES[version]))
    offer: dict[str, Any] = json.loads((DATA / f"tensorrt-{version}.json").read_text())
    return offer


def plan_of(directory: Path, graph: Graph, profiles: tuple[Profile, ...], options: PlanOptions) -> bytes:
    """A plan that this runtime executes; `options` play no part."""
    bounds = [shapes(graph, profile) for profile in profiles]
    return json.dumps({"onnx": str(directory.absolute() / graph.file), "profiles": bounds}).encode()


class HostRuntime:
    """A stand-in for `import tensorrt` on the machine that runs plans.

    `calls` lists what was called, by dotted name, with its arguments.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, version: str) -> None:
        offer = offer_of(version)
        self.__version__ = version
        self.__spec__ = ModuleSpec(PACKAGES.get(version, "tensorrt"), None)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: dict[str, Any] = {}
        """Result of a dotted method in place of success; an exception is raised."""
        self.ILogger = type("ILogger", (), {})  # subclassed by our code
        self.compiled: list[str] = []
        """Graphs whose kernels TensorRT-RTX compiled, not having them in its cache."""
        self.creators: set[tuple[str, ...]] = set()
        self.feeds: list[dict[str, Any]] = []
        """Inputs of each execution, as they lay in memory."""
        for name, members in offer["enums"].items():
            setattr(self, name, enum.IntEnum(name, members, start=0))
        for name, described in offer["classes"].items():
            setattr(self, name, _make_class(self, name, described))
        for name, overloads in offer["functions"].items():
            setattr(self, name, _function(self, name, overloads, BEHAVIOUR[name]))

    def arguments(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of `name`."""
        return [arguments for called, arguments in self.calls if called == name]


def _make_class(host: HostRuntime, name: str, described: dict[str, Any]) -> type:
    attributes, writable = set(described["attributes"]), set(described["writable"])

    def get(self: Any, key: str) -> Any:
        if key in attributes | writable:
            return BEHAVIOUR[f"{name}.{key}"](host, self)
        raise AttributeError(f"TensorRT {host.__version__}: {name} has no {key!r}")

    def put(self: Any, key: str, value: object) -> None:
        if not key.startswith("_") and type(self) is cls:
            if key not in writable:
                raise AttributeError(f"TensorRT {host.__version__}: {name}.{key} cannot be set")
            host.calls.append((f"{name}.{key}", (value,)))
        object.__setattr__(self, key, value)

    constants = {key: key for key in attributes if key.isupper()}
    body: dict[str, Any] = {"__getattr__": get, "__setattr__": put, **constants}
    for method, overloads in described["methods"].items():
        dotted = f"{name}.{method}"
        body[method] = _method(host, dotted, overloads, BEHAVIOUR.get(dotted))
    body.setdefault("__init__", _refuse_construction)
    cls = type(name, (), body)
    return cls


def _refuse_construction(self: Any) -> None:
    raise TypeError(f"{type(self).__name__}: no constructor defined")


def _method(host: HostRuntime, name: str, overloads: list[list[str]], behaviour: Any) -> Callable[..., Any]:
    function = _function(host, name, overloads, behaviour, skip=1)
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


def _function(
    host: HostRuntime, name: str, overloads: list[list[str]], behaviour: Any, skip: int = 0
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[skip:]
        if not any(accepts(overload, len(given), set(kwargs)) for overload in overloads):
            raise TypeError(f"TensorRT {host.__version__}: {name}{given}{kwargs}: none of {overloads}")
        host.calls.append((name, (*given, *kwargs.values())))
        if isinstance(answer := host.answers.get(name), Exception):
            raise answer
        if name in host.answers:
            return answer
        if behaviour is None:
            if name.endswith(".__init__"):
                return None
            raise NotImplementedError(f"{name}: the host has no behaviour for it")
        return behaviour(host, *args, **kwargs)

    return call


def accepts(overload: list[str], positional: int, keywords: set[str]) -> bool:
    """Whether an overload accepts `positional` positional arguments and these keywords."""
    names = [name.rstrip("=") for name in overload]
    filled = {*names[:positional], *keywords}
    required = {name for name in overload if not name.endswith("=")}
    return positional <= len(names) and keywords <= set(names[positional:]) and required <= filled


# Behaviour of the calls. Objects that TensorRT returns are made without their constructor, as by pybind11.


def _make(host: HostRuntime, name: str, **state: Any) -> Any:
    made = object.__new__(getattr(host, name))
    for key, value in state.items():
        object.__setattr__(made, f"_{key}", value)
    return made


def _deserialize(host: HostRuntime, runtime: Any, serialized: bytes) -> Any:
    plan = json.loads(serialized)
    file = Path(plan["onnx"])
    model = onnx.load(file, load_external_data=False)
    inputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    outputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    session = model_session(model, file.parent)
    context = _attention_attributes(file.parent)
    scales = np.array([[layer[f"{x}_scale"] for layer in context] for x in "kv"], dtype=np.float32)  # [2, L]
    return _make(
        host, "ICudaEngine", plan=plan, inputs=inputs, outputs=outputs, session=session, scales=scales,
        context=context,
    )  # fmt: skip


def _attention_attributes(directory: Path) -> list[dict[str, Any]]:
    """By layer. The scales are an FP8 cache's: codes times scale are what the CPU lowering computes."""
    files = directory.glob("draft*.onnx")  # one, or the segments of a rank
    found = [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for file in files
        for node in onnx.load(file, load_external_data=False).graph.node
        if node.op_type == ATTENTION
    ]
    return sorted(found, key=lambda attributes: int(attributes["layer"]))


class _Kernels:
    """Graphs compiled by TensorRT-RTX whose contexts were made."""

    def __init__(self) -> None:
        self.content = b"kernels of"


def _deserialize_cache(host: HostRuntime, cache: Any, blob: bytes) -> bool:
    """False for another environment's, as the bindings say."""
    if not blob.startswith(b"kernels of"):
        return False
    cache._kernels.content = blob
    return True


def _create_context(host: HostRuntime, engine: Any, strategy: Any) -> Any:
    """`strategy` is a runtime configuration in TensorRT-RTX: compiles what its cache has not."""
    cache = getattr(strategy, "_cache", None)
    if cache is not None and (name := b" " + Path(engine._plan["onnx"]).name.encode()) not in cache._kernels.content:
        cache._kernels.content += name
        host.compiled.append(name.decode().strip())
    return _make(host, "IExecutionContext", engine=engine, profile=None, shapes={}, addresses={})


def _choose_profile(host: HostRuntime, context: Any, profile_index: int, stream_handle: int) -> bool:
    """Never False: the bindings raise where the C++ call returns it."""
    profiles = context._engine._plan["profiles"]
    if not 0 <= profile_index < len(profiles):
        raise RuntimeError("Error in set optimization profile async.")
    context._profile = profiles[profile_index]
    return True


def _set_input_shape(host: HostRuntime, context: Any, name: str, shape: tuple[int, ...]) -> bool:
    smallest, _, largest = context._profile[name]
    context._shapes[name] = shape
    return len(shape) == len(smallest) and all(
        low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
    )


def _set_address(host: HostRuntime, context: Any, name: str, memory: int) -> bool:
    context._addresses[name] = memory
    return name in context._engine._inputs | context._engine._outputs


def _execute(host: HostRuntime, context: Any, stream_handle: int) -> bool:
    """Reads the bound inputs, computes in FLOAT, writes the bound outputs in their own dtype."""
    engine = context._engine
    feed = {
        name: _read(context._addresses[name], dtype, context._shapes[name]) for name, dtype in engine._inputs.items()
    }
    host.feeds.append(dict(feed))
    if "page_table" in feed:
        where = [feed.pop(name) for name in ("context_pointers", "context_layout", "page_table", "slot_ids")]
        feed |= _caches(engine._context, *where, feed["context_lengths"])
    for name, value in zip(engine._outputs, engine._session.run(list(engine._outputs), feed), strict=True):
        dtype = engine._outputs[name]
        codes = value / engine._scales[..., None, None] if dtype == TensorProto.FLOAT8E4M3FN else value
        _write(context._addresses[name], dtype, codes)
    return True


def _caches(attributes: list[dict[str, Any]], pointers: Any, layout: Any, table: Any, slots: Any, lengths: Any) -> Any:
    """Inputs of the CPU's graph: each block's context rows in a separate slot, padded with zeros."""
    size, page_stride, kv_stride, row_stride, head_stride, _ = map(int, layout)
    C, G, D = max(1, *lengths), attributes[0]["num_kv_heads"], attributes[0]["head_dim"]
    caches = np.zeros((2, len(slots), len(pointers), C, G, D), dtype=np.float32)
    for b, layer, page, kv in np.ndindex(len(slots), len(pointers), -(-C // size), 2):
        begin, end = page * size, min((page + 1) * size, int(lengths[b]))
        if begin < end:
            at = int(pointers[layer][0]) + int(table[slots[b], page]) * page_stride + kv * kv_stride
            dtype = TensorProto.FLOAT8E4M3FN if attributes[layer]["fp8_cache"] else TensorProto.BFLOAT16
            values = _read(at, dtype, (end - begin, G, D), row_stride, head_stride)
            caches[kv, b, layer, begin:end] = values * attributes[layer][f"{'kv'[kv]}_scale"]
    return {"k_cache": caches[0], "v_cache": caches[1], "page_ids": np.arange(len(slots), dtype=np.int32)[:, None]}


def _read(address: int, dtype: int, shape: tuple[int, ...], *strides: int) -> Any:
    """A copy of an array whose outer dimensions have `strides` in bytes, and whose others are dense."""
    kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(dtype))
    dense = [kind.itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    steps = (*strides, *dense[len(strides) :])
    size = kind.itemsize + sum(step * (count - 1) for step, count in zip(steps, shape, strict=True))
    value: Any = np.ndarray(shape, kind, (ctypes.c_ubyte * size).from_address(address), strides=steps)
    return value.copy() if kind.kind == "i" else value.astype(np.float32)


def _write(address: int, dtype: int, value: Any) -> None:
    content = np.ascontiguousarray(value.astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))).tobytes()
    ctypes.memmove(address, content, len(content))


BEHAVIOUR: dict[str, Callable[..., Any]] = {
    "get_plugin_registry": lambda r: _make(r, "IPluginRegistry"),
    "IPluginRegistry.get_creator": lambda r, self, *key: object() if key in r.creators else None,
    "IPluginRegistry.load_library": lambda r, self, path: r.creators.add(
        ("DFlashKVInjectionAttention", "5", "dflash_trt")
    ),
    "Runtime.deserialize_cuda_engine": _deserialize,
    "ICudaEngine.device_memory_size_v2": lambda r, self: 4096,
    "ICudaEngine.create_execution_context": _create_context,
    "ICudaEngine.get_tensor_mode": lambda r, self, name: (
        r.TensorIOMode.INPUT if name in self._inputs else r.TensorIOMode.OUTPUT
    ),
    "ICudaEngine.create_runtime_config": lambda r, self: _make(r, "IRuntimeConfig"),
    "IRuntimeConfig.set_execution_context_allocation_strategy": lambda r, self, strategy: None,
    "IRuntimeConfig.create_runtime_cache": lambda r, self: _make(r, "IRuntimeCache", kernels=_Kernels()),
    "IRuntimeConfig.set_runtime_cache": lambda r, self, cache: object.__setattr__(self, "_cache", cache) or True,
    "IRuntimeCache.deserialize": _deserialize_cache,
    "IRuntimeCache.serialize": lambda r, self: self._kernels.content,
    "IExecutionContext.is_stream_capturable": lambda r, self, stream: True,
    "IExecutionContext.set_optimization_profile_async": _choose_profile,
    "IExecutionContext.set_device_memory": lambda r, self, memory, size: None,
    "IExecutionContext.set_input_shape": _set_input_shape,
    "IExecutionContext.set_tensor_address": _set_address,
    "IExecutionContext.execute_async_v3": _execute,
}
