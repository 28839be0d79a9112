# SPDX-License-Identifier: Apache-2.0
"""The plugin library as TensorRT calls it: through virtual function tables, here by ctypes.

The slots and structures are TensorRT's (NvInferRuntime.h 10.13 to 11.1), written down a second time, so that a
slip in plugins/tensorrt_abi/interface.h shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p, cast, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOAT, HALF, INT8, INT32, BOOL, FP8, BF16, INT64 = 0, 1, 2, 3, 4, 6, 7, 8  # DataType
FIELD_FLOAT32, FIELD_FLOAT64, FIELD_INT32, FIELD_INT64 = 1, 2, 5, 10  # PluginFieldType
LINEAR, CHW2 = 0, 1  # TensorFormat
BUILD, RUNTIME = 0, 1  # TensorRTPhase


class Dims(Structure):
    _fields_ = (("rank", c_int32), ("d", c_int64 * 8))


class Desc(Structure):
    """PluginTensorDesc."""

    _fields_ = (("dims", Dims), ("type", c_int32), ("format", c_int32), ("scale", c_float))


class DynamicDesc(Structure):
    """DynamicPluginTensorDesc."""

    _fields_ = (("desc", Desc), ("min", Dims), ("max", Dims), ("opt", Dims))


class DimsExprs(Structure):
    _fields_ = (("rank", c_int32), ("d", c_void_p * 8))


class Field(Structure):
    _fields_ = (("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32))


class Fields(Structure):
    """PluginFieldCollection."""

    _fields_ = (("count", c_int32), ("fields", POINTER(Field)))


class Interface(Structure):
    """InterfaceInfo."""

    _fields_ = (("kind", c_char_p), ("major", c_int32), ("minor", c_int32))


assert (sizeof(Dims), sizeof(Desc), sizeof(DynamicDesc), sizeof(DimsExprs), sizeof(Field)) == (72, 88, 304, 72, 24)


def call(this: int, slot: int, result: Any, *arguments: Any) -> Any:
    """Virtual function `slot` of the object at `this`; arguments are ctypes values."""
    table = cast(this, POINTER(POINTER(c_void_p))).contents
    function = ctypes.CFUNCTYPE(result, c_void_p, *(type(argument) for argument in arguments))(table[slot])
    return function(this, *arguments)


def interface(this: int) -> tuple[str, int, int]:
    """Slot 0 is getAPILanguage, 1 getInterfaceInfo; 2 and 3 are destructors; an interface's own begin at 4."""
    assert call(this, 0, c_int32) == 0  # C++
    info = call(this, 1, Interface)
    return info.kind.decode(), info.major, info.minor


@dataclass(frozen=True)
class Value:
    """A plugin field."""

    name: str
    value: float
    type: int
    length: int = 1


def attribute(name: str, value: float) -> Value:
    """A field as the ONNX parser makes it of a node's attribute."""
    return Value(name, value, FIELD_FLOAT32 if isinstance(value, float) else FIELD_INT32)


def desc(shape: Sequence[int], dtype: int, layout: int = LINEAR) -> Desc:
    return Desc(Dims(len(shape), (c_int64 * 8)(*shape)), dtype, layout, 1.0)


def dynamic(shape: Sequence[int], dtype: int, least: Sequence[int] | None = None) -> DynamicDesc:
    """A tensor of a profile: at most `shape`, at least `least`, open where they differ."""
    least = shape if least is None else least
    open_shape = [a if a == b else -1 for a, b in zip(least, shape, strict=True)]
    low, high = desc(least, dtype).dims, desc(shape, dtype).dims
    return DynamicDesc(desc(open_shape, dtype), low, high, high)


class Plugin:
    """An IPluginV3 and its capabilities. `close` deletes it."""

    def __init__(self, this: int) -> None:
        self.this = this
        self.core, self.build, self.runtime = (call(this, 4, c_void_p, c_int32(kind)) for kind in range(3))

    def close(self) -> None:
        call(self.this, 3, None)

    def clone(self) -> Plugin:
        return Plugin(call(self.this, 5, c_void_p))

    def names(self) -> tuple[str, str, str]:
        """Name, version, namespace."""
        name, version, namespace = (call(self.core, slot, c_char_p).decode() for slot in (4, 5, 6))
        return name, version, namespace

    def configure(self, inputs: Sequence[DynamicDesc], outputs: Sequence[DynamicDesc]) -> int:
        return int(call(self.build, 4, c_int32, *_arrays(DynamicDesc, inputs, outputs)))

    def output_types(self, types: Sequence[int]) -> tuple[int, list[int]]:
        out = (c_int32 * 1)(-1)
        inputs = (c_int32 * len(types))(*types)
        status = call(self.build, 5, c_int32, c_void_p(ctypes.addressof(out)), c_int32(1), inputs, c_int32(len(types)))
        return status, list(out)

    def output_shape(self, inputs: Sequence[DimsExprs], constants: dict[int, int]) -> tuple[int, DimsExprs]:
        """With an IExprBuilder that makes these numbers expressions, and does nothing else.

        It is a table that no call may touch, and the object that its functions call: two destructors, then constant.
        """
        array, out = (DimsExprs * len(inputs))(*inputs), DimsExprs()
        shape_inputs = c_void_p(), c_int32(0)
        outputs = c_void_p(ctypes.addressof(out)), c_int32(1)
        constant = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_int64)(lambda _, value: constants[value])
        table = (c_void_p * 3)(None, None, cast(constant, c_void_p))
        implementation = (c_void_p * 1)(ctypes.addressof(table))
        builder = (c_void_p * 2)(None, ctypes.addressof(implementation))
        pointer = c_void_p(ctypes.addressof(builder))
        return call(self.build, 6, c_int32, array, c_int32(len(inputs)), *shape_inputs, *outputs, pointer), out

    def supports(self, position: int, tensors: Sequence[DynamicDesc], num_inputs: int) -> bool:
        array = (DynamicDesc * len(tensors))(*tensors)
        counts = c_int32(num_inputs), c_int32(len(tensors) - num_inputs)
        return bool(call(self.build, 7, ctypes.c_bool, c_int32(position), array, *counts))

    def num_outputs(self) -> int:
        return int(call(self.build, 8, c_int32))

    def workspace(self, inputs: Sequence[DynamicDesc], outputs: Sequence[DynamicDesc]) -> int:
        return int(call(self.build, 9, c_size_t, *_arrays(DynamicDesc, inputs, outputs)))

    def tactics(self) -> tuple[int, int, str | None, int, str | None]:
        """getValidTactics of none, getNbTactics, getTimingCacheID, getFormatCombinationLimit, getMetadataString."""
        valid = call(self.build, 10, c_int32, c_void_p(), c_int32(0))
        return valid, *(call(self.build, slot, kind) for slot, kind in enumerate((c_int32, c_char_p) * 2, start=11))

    def on_shape_change(self, inputs: Sequence[Desc], outputs: Sequence[Desc]) -> int:
        return int(call(self.runtime, 5, c_int32, *_arrays(Desc, inputs, outputs)))

    def enqueue(
        self, inputs: Sequence[Desc], output: Desc, addresses: Sequence[int | None], workspace: int | None, stream: int
    ) -> int:
        """`addresses` of the inputs, then the output."""
        ins = (c_void_p * len(inputs))(*addresses[:-1])
        outs = (c_void_p * 1)(addresses[-1])
        descs = (Desc * len(inputs))(*inputs), (Desc * 1)(output)
        return int(call(self.runtime, 6, c_int32, *descs, ins, outs, c_void_p(workspace), c_void_p(stream)))

    def attach(self) -> Plugin:
        return Plugin(call(self.runtime, 7, c_void_p, c_void_p()))

    def serialized(self) -> list[Value]:
        return _values(call(self.runtime, 8, c_void_p))


class Creator:
    """The one creator of a plugin library."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.getCreators.restype = POINTER(c_void_p)
        count = c_int32()
        creators = self._library.getCreators(byref(count))
        assert count.value == 1
        self.this = creators[0]

    def names(self) -> tuple[str, str, str]:
        """Name, version, namespace."""
        name, version, namespace = (call(self.this, slot, c_char_p).decode() for slot in (6, 7, 8))
        return name, version, namespace

    def field_names(self) -> list[tuple[str, int]]:
        collection = cast(call(self.this, 5, c_void_p), POINTER(Fields)).contents
        return [(field.name.decode(), field.type) for field in collection.fields[: collection.count]]

    def create(self, values: Sequence[Value], phase: int, layer: str = "layer") -> Plugin | None:
        holders = [_holder(value) for value in values]
        fields = [
            Field(value.name.encode(), cast(byref(holder), c_void_p), value.type, value.length)
            for value, holder in zip(values, holders, strict=True)
        ]
        collection = Fields(len(fields), (Field * len(fields))(*fields))
        this = call(
            self.this, 4, c_void_p, c_char_p(layer.encode()), c_void_p(ctypes.addressof(collection)), c_int32(phase)
        )
        return Plugin(this) if this else None


TYPES: dict[int, Any] = {
    FIELD_FLOAT32: c_float,
    FIELD_FLOAT64: ctypes.c_double,
    FIELD_INT32: c_int32,
    FIELD_INT64: c_int64,
}


def _holder(value: Value) -> Any:
    kind = TYPES[value.type]
    return kind(value.value if kind in (c_float, ctypes.c_double) else int(value.value))


def _values(collection: int) -> list[Value]:
    found = cast(collection, POINTER(Fields)).contents
    return [
        Value(
            field.name.decode(), cast(field.data, POINTER(TYPES[field.type])).contents.value, field.type, field.length
        )
        for field in found.fields[: found.count]
    ]


def _arrays(kind: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[Any, ...]:
    """in, number, out, number."""
    return (kind * len(inputs))(*inputs), c_int32(len(inputs)), (kind * len(outputs))(*outputs), c_int32(len(outputs))
