# SPDX-License-Identifier: Apache-2.0
"""The tensorrt module as far as its names go: every attribute, argument and enum member must be in the real bindings.

Plans are JSON that say what was built; a context executes its plan's graph with ONNX Runtime on the very addresses
that were bound, so that a drafter on top of it computes.
"""

# mypy: disable-error-code="call-arg"

from __future__ import annotations

import ctypes
import enum
import json
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.runtime.drafter.onnxruntime.ort_session import model_session

DATA = Path(__file__).parent
VERSIONS = ("10.15.1.29", "11.4.0.106")


class Recorder:
    """A stand-in for `import tensorrt`; `calls` lists what was called, by dotted name, with its arguments."""

    def __init__(self, version: str) -> None:
        offer = json.loads((DATA / f"tensorrt-{version}.json").read_text())
        self.__version__ = version
        self.__spec__ = ModuleSpec("tensorrt", None)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.parser_errors: list[tuple[str, str, str]] = []
        self.answers: dict[str, Any] = {}
        """What a dotted method returns, or raises where it is an exception, in the place of success."""
        self.creators: set[tuple[str, ...]] = set()
        for name, members in offer["enums"].items():
            setattr(self, name, enum.IntEnum(name, members, start=0))
        for name, described in offer["classes"].items():
            setattr(self, name, _make_class(self, name, described))
        for name, overloads in offer["functions"].items():
            setattr(self, name, _function(self, name, overloads, BEHAVIOUR[name]))

    def arguments(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of each call of `name`."""
        return [arguments for called, arguments in self.calls if called == name]


def _make_class(recorder: Recorder, name: str, described: dict[str, Any]) -> type:
    attributes, writable = set(described["attributes"]), set(described["writable"])

    def get(self: Any, key: str) -> Any:
        if key in attributes | writable:
            return BEHAVIOUR[f"{name}.{key}"](recorder, self)
        raise AttributeError(f"TensorRT {recorder.__version__}: {name} has no {key!r}")

    def put(self: Any, key: str, value: object) -> None:
        if not key.startswith("_") and type(self) is cls:
            if key not in writable:
                raise AttributeError(f"TensorRT {recorder.__version__}: {name}.{key} cannot be set")
            recorder.calls.append((f"{name}.{key}", (value,)))
        object.__setattr__(self, key, value)

    constants = {key: key for key in attributes if key.isupper()}
    body: dict[str, Any] = {"__getattr__": get, "__setattr__": put, **constants}
    for method, overloads in described["methods"].items():
        dotted = f"{name}.{method}"
        body[method] = _method(recorder, dotted, overloads, BEHAVIOUR.get(dotted))
    body.setdefault("__init__", _refuse_construction)
    cls = type(name, (), body)
    return cls


def _refuse_construction(self: Any) -> None:
    raise TypeError(f"{type(self).__name__}: no constructor defined")


def _method(recorder: Recorder, name: str, overloads: list[list[str]], behaviour: Any) -> Callable[..., Any]:
    function = _function(recorder, name, overloads, behaviour, skip=1)
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


def _function(
    recorder: Recorder, name: str, overloads: list[list[str]], behaviour: Any, skip: int = 0
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[skip:]
        if not any(_accepts(overload, len(given), set(kwargs)) for overload in overloads):
            raise TypeError(f"TensorRT {recorder.__version__}: {name}{given}{kwargs}: none of {overloads}")
        recorder.calls.append((name, (*given, *kwargs.values())))
        if isinstance(answer := recorder.answers.get(name), Exception):
            raise answer
        if name in recorder.answers:
            return answer
        if behaviour is None:
            if name.endswith(".__init__"):
                return None
            raise NotImplementedError(f"{name}: the recorder has no behaviour for it")
        return behaviour(recorder, *args, **kwargs)

    return call


def _accepts(overload: list[str], positional: int, keywords: set[str]) -> bool:
    names = [name.rstrip("=") for name in overload]
    filled = {*names[:positional], *keywords}
    required = {name for name in overload if not name.endswith("=")}
    return positional <= len(names) and keywords <= set(names[positional:]) and required <= filled


# What the calls do. Objects that TensorRT hands out are made without their constructor, as by pybind11.


def _make(recorder: Recorder, name: str, **state: Any) -> Any:
    made = object.__new__(getattr(recorder, name))
    for key, value in state.items():
        object.__setattr__(made, f"_{key}", value)
    return made


class _HostMemory(bytes):
    """Has the buffer interface, which a class made here could not have."""


def _parse(recorder: Recorder, parser: Any, model: str) -> bool:
    parser._network._file = model
    return Path(model).is_file() and not recorder.parser_errors


def _init_parser(recorder: Recorder, parser: Any, network: Any, logger: Any) -> None:
    object.__setattr__(parser, "_network", network)


def _build(recorder: Recorder, builder: Any, network: Any, config: Any) -> _HostMemory:
    monitor = config.progress_monitor
    monitor.phase_start("outer", None, 2)
    monitor.phase_start("inner", "outer", 1)
    assert monitor.step_complete("inner", 0)
    monitor.phase_finish("inner")
    monitor.phase_finish("outer")
    return _HostMemory(json.dumps({"onnx": network._file, "profiles": config._profiles}).encode())


def _add_profile(recorder: Recorder, config: Any, profile: Any) -> int:
    config._profiles.append(profile._shapes)
    return len(config._profiles) - 1


def _set_shape(recorder: Recorder, profile: Any, name: str, *shapes: list[int]) -> None:
    """Raises as pyInfer.cpp does where IOptimizationProfile::setDimensions returns false."""
    smallest, best, largest = shapes
    bounds = list(zip(smallest, best, largest, strict=False))
    is_consistent = len(smallest) == len(best) == len(largest) and all(0 <= a <= b <= c for a, b, c in bounds)
    if not is_consistent:
        raise RuntimeError("Shape provided is inconsistent with other shapes.")
    profile._shapes[name] = shapes


def _deserialize(recorder: Recorder, runtime: Any, serialized: bytes) -> Any:
    plan = json.loads(serialized)
    file = Path(plan["onnx"])
    model = onnx.load(file, load_external_data=False)
    inputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    outputs = {value.name: value.type.tensor_type.elem_type for value in model.graph.output}
    session = model_session(model, file.parent)
    context = _attention_attributes(file.parent)
    scales = {x: np.array([layer[f"{x}_scale"] for layer in context], dtype=np.float32) for x in "kv"}
    return _make(
        recorder, "ICudaEngine", plan=plan, inputs=inputs, outputs=outputs, session=session, scales=scales,
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


def _create_context(recorder: Recorder, engine: Any, strategy: Any) -> Any:
    return _make(recorder, "IExecutionContext", engine=engine, profile=None, shapes={}, addresses={})


def _choose_profile(recorder: Recorder, context: Any, profile_index: int, stream_handle: int) -> bool:
    """Never False: the bindings raise where the C++ call returns it."""
    profiles = context._engine._plan["profiles"]
    if not 0 <= profile_index < len(profiles):
        raise RuntimeError("Error in set optimization profile async.")
    context._profile = profiles[profile_index]
    return True


def _set_input_shape(recorder: Recorder, context: Any, name: str, shape: tuple[int, ...]) -> bool:
    smallest, _, largest = context._profile[name]
    context._shapes[name] = shape
    return len(shape) == len(smallest) and all(
        low <= size <= high for low, size, high in zip(smallest, shape, largest, strict=True)
    )


def _set_address(recorder: Recorder, context: Any, name: str, memory: int) -> bool:
    context._addresses[name] = memory
    return name in context._engine._inputs | context._engine._outputs


INTEGERS = {TensorProto.INT32: np.int32, TensorProto.INT64: np.int64}
BYTES = {
    TensorProto.BFLOAT16: 2, TensorProto.FLOAT: 4, TensorProto.FLOAT8E4M3FN: 1, TensorProto.INT32: 4,
    TensorProto.INT64: 8,
}  # fmt: skip


def _execute(recorder: Recorder, context: Any, stream_handle: int) -> bool:
    """Reads the bound inputs, computes in FLOAT, writes the bound outputs in their own dtype."""
    engine = context._engine
    feed = {}
    for name, dtype in engine._inputs.items():
        value = _read(context._addresses[name], dtype, context._shapes[name])
        feed[name] = value
    if "page_table" in feed:
        where = [feed.pop(name) for name in ("context_pointers", "context_layout", "page_table", "slot_ids")]
        feed |= _caches(engine._context, *where, feed["context_lengths"])
    for name, value in zip(engine._outputs, engine._session.run(list(engine._outputs), feed), strict=True):
        dtype = engine._outputs[name]
        codes = value / _by_layer(engine._scales[name[0]], value) if dtype == TensorProto.FLOAT8E4M3FN else value
        _write(context._addresses[name], dtype, codes)
    return True


def _caches(attributes: list[dict[str, Any]], pointers: Any, layout: Any, table: Any, slots: Any, lengths: Any) -> Any:
    """What the CPU's graph takes: each block's context rows as a slot of its own, zeros behind them."""
    size, page_stride, kv_stride, row_stride, head_stride = map(int, layout)
    C, G, D = max(1, *lengths), attributes[0]["num_kv_heads"], attributes[0]["head_dim"]
    caches = np.zeros((2, len(slots), len(pointers), C, G, D), dtype=np.float32)
    for b, layer, row, kv, head in np.ndindex(len(slots), len(pointers), C, 2, G):
        if row < lengths[b]:
            at = int(pointers[layer]) + int(table[slots[b], row // size]) * page_stride + kv * kv_stride
            dtype = TensorProto.FLOAT8E4M3FN if attributes[layer]["fp8_cache"] else TensorProto.BFLOAT16
            values = _read(at + row % size * row_stride + head * head_stride, dtype, (D,))
            caches[kv, b, layer, row, head] = values * attributes[layer][f"{'kv'[kv]}_scale"]
    return {"k_cache": caches[0], "v_cache": caches[1], "page_ids": np.arange(len(slots), dtype=np.int32)[:, None]}


def _by_layer(scales: Any, value: Any) -> Any:
    """`scales` [L] along axis 1, where cache rows and caches have their layers."""
    return scales.reshape(-1, *[1] * (value.ndim - 2))


def _read(address: int, dtype: int, shape: tuple[int, ...]) -> Any:
    count = int(np.prod(shape))
    raw = np.frombuffer(ctypes.string_at(address, count * BYTES[dtype]), dtype=np.uint8)
    if dtype in INTEGERS:
        return raw.view(INTEGERS[dtype]).reshape(shape)
    return raw.view(onnx.helper.tensor_dtype_to_np_dtype(dtype)).astype(np.float32).reshape(shape)


def _write(address: int, dtype: int, value: Any) -> None:
    content = np.ascontiguousarray(value.astype(onnx.helper.tensor_dtype_to_np_dtype(dtype))).tobytes()
    ctypes.memmove(address, content, len(content))


def _inspect(recorder: Recorder, inspector: Any, *described_as: Any) -> str:
    """A layer for each node, the dequantised inputs of a Gemm fused into it."""
    nodes = onnx.load(Path(inspector._engine._plan["onnx"]), load_external_data=False).graph.node
    made_by = {output: node for node in nodes for output in node.output}
    layers = [
        {"Name": node.name, "Inputs": [{"Format/Datatype": _datatype(name, made_by)} for name in node.input]}
        for node in nodes
    ]
    return json.dumps({"Layers": layers})


def _datatype(name: str, made_by: dict[str, Any]) -> str:
    node = made_by.get(name)
    while node is not None and node.op_type == "Cast":
        node = made_by.get(node.input[0])
    return f"Row major linear {'FP8' if node is not None and node.op_type == 'DequantizeLinear' else 'BF16'}"


BEHAVIOUR: dict[str, Callable[..., Any]] = {
    "get_plugin_registry": lambda r: _make(r, "IPluginRegistry"),
    "IPluginRegistry.get_creator": lambda r, self, *key: object() if key in r.creators else None,
    "IPluginRegistry.load_library": lambda r, self, path: r.creators.add(
        ("DFlashKVInjectionAttention", "3", "dflash_trt")
    ),
    "Builder.create_network": lambda r, self, flags=0: _make(r, "INetworkDefinition", file=None),
    "Builder.create_builder_config": lambda r, self: _make(r, "IBuilderConfig", profiles=[]),
    "Builder.create_optimization_profile": lambda r, self: _make(r, "IOptimizationProfile", shapes={}),
    "Builder.build_serialized_network": _build,
    "OnnxParser.__init__": _init_parser,
    "OnnxParser.parse_from_file": _parse,
    "OnnxParser.num_errors": lambda r, self: len(r.parser_errors),
    "OnnxParser.get_error": lambda r, self, index: _make(r, "ParserError", about=r.parser_errors[index]),
    "ParserError.node_name": lambda r, self: self._about[0],
    "ParserError.node_operator": lambda r, self: self._about[1],
    "ParserError.desc": lambda r, self: self._about[2],
    "IOptimizationProfile.set_shape": _set_shape,
    "IBuilderConfig.add_optimization_profile": _add_profile,
    "IBuilderConfig.set_memory_pool_limit": lambda r, self, pool, size: None,
    "IBuilderConfig.set_flag": lambda r, self, flag: None,
    "IBuilderConfig.create_timing_cache": lambda r, self, content: _make(r, "ITimingCache", content=content),
    "IBuilderConfig.set_timing_cache": lambda r, self, cache, ignore_mismatch: True,
    "IBuilderConfig.get_timing_cache": lambda r, self: _make(r, "ITimingCache", content=b""),
    "ITimingCache.serialize": lambda r, self: _HostMemory(b"timings"),
    "Runtime.deserialize_cuda_engine": _deserialize,
    "ICudaEngine.device_memory_size_v2": lambda r, self: 4096,
    "ICudaEngine.create_execution_context": _create_context,
    "ICudaEngine.create_engine_inspector": lambda r, self: _make(r, "EngineInspector", engine=self),
    "EngineInspector.get_engine_information": _inspect,
    "ICudaEngine.get_tensor_mode": lambda r, self, name: (
        r.TensorIOMode.INPUT if name in self._inputs else r.TensorIOMode.OUTPUT
    ),
    "IExecutionContext.set_optimization_profile_async": _choose_profile,
    "IExecutionContext.set_device_memory": lambda r, self, memory, size: None,
    "IExecutionContext.set_input_shape": _set_input_shape,
    "IExecutionContext.set_tensor_address": _set_address,
    "IExecutionContext.execute_async_v3": _execute,
}
