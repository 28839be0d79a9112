# SPDX-License-Identifier: Apache-2.0
"""What TensorRT's parser and builder would say of a graph file: dtypes, shapes, fusion and the bytes of its weights.

The rules are read from onnx-tensorrt 10.10 and NvInfer.h; the builder itself has not been asked. A plugin node's
attributes are tried on the real creator in `plugin_creator.py`.

An extent of a shape is a number times dynamic axes: (8, ("B",)) for the rows of B blocks of 8. It is `opaque` where the
parser has it from shape tensors only: behind a Split of a tensor with dynamic axes it is Gather(Concat(Shape, ...)),
whose value a layer that wants a static extent does not see (onnx-tensorrt 10.10, importerUtils.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import uses_external_data

from tests.contract.strong_typing import Checker


class Extent(NamedTuple):
    """`factor` times the dynamic axes in `symbols`, sorted."""

    factor: int
    symbols: tuple[str, ...] = ()
    opaque: bool = False

    def __str__(self) -> str:
        return "*".join([*(() if self.symbols and self.factor == 1 else (str(self.factor),)), *self.symbols])

    def is_same(self, other: Extent) -> bool:
        """Whether both are the same number."""
        return self[:2] == other[:2]


Shape = tuple[Extent, ...]
ONE = Extent(1)
BLOCK = 16
SAME_SHAPE = {"Cast", "Identity", "Sigmoid", "Softplus", "Sqrt", "Tanh", "QuantizeLinear"}
ELEMENTWISE = {"Add", "Sub", "Mul", "Div"}


class ShapeError(Exception):
    """Why a node's shapes do not fit."""


def text(shape: Shape) -> str:
    """A shape written as [2*B, 64]."""
    return f"[{', '.join(map(str, shape))}]"


def declared(value: onnx.ValueInfoProto) -> Shape:
    """Shape that a graph declares for an input or output."""
    axes = value.type.tensor_type.shape.dim
    return tuple(Extent(1, (axis.dim_param,)) if axis.dim_param else Extent(axis.dim_value) for axis in axes)


def output_shapes(node: onnx.NodeProto, inputs: Sequence[Shape], constants: Sequence[list[int] | None]) -> list[Shape]:
    """Shape of each output; `constants` are the integers of initializer inputs. Raises ShapeError."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    x = inputs[0]
    match node.op_type:
        case op_type if op_type in SAME_SHAPE:
            return [x]
        case op_type if op_type in ELEMENTWISE:
            return [_broadcast(*inputs)]
        case "Gemm":
            return [_gemm(inputs[0], inputs[1], attributes)]
        case "MatMul":
            _expect(x[-1].is_same(inputs[1][-2]), f"MatMul of {text(x)} and {text(inputs[1])}")
            return [(*x[:-1], inputs[1][-1])]
        case "Reshape":
            return [_reshape(x, constants[1] or [])]
        case "Split":
            return _split(x, attributes["axis"], constants[1] or [])
        case "Slice":
            return [_slice(x, *(values or [] for values in constants[1:]))]
        case "Pad":
            return [_pad(x, constants[1] or [])]
        case "TopK":
            return [_top_k(x, attributes["axis"], constants[1] or [])] * 2
        case "Concat":
            return [_concat(inputs, attributes["axis"])]
        case "Transpose":
            return [tuple(x[axis] for axis in attributes["perm"])]
        case "ArgMax":
            _expect(attributes["axis"] == -1 and attributes["keepdims"] == 0, "ArgMax of another axis")
            return [x[:-1]]
        case "Gather":
            axis = attributes.get("axis", 0) % len(x)
            return [(*x[:axis], *inputs[1], *x[axis + 1 :])]
        case "ReduceMean":
            axes = {axis % len(x) for axis in constants[1] or []}
            return [tuple(ONE if axis in axes else extent for axis, extent in enumerate(x))]
        case "Unsqueeze":
            shape = list(x)
            for axis in constants[1] or []:
                shape.insert(axis, ONE)
            return [tuple(shape)]
        case "DequantizeLinear":
            return [_dequantize(x, inputs[1], attributes.get("block_size"), attributes.get("axis", -1))]
        case "TRT_FP4DynamicQuantize":
            return _dynamic_quantize(x)
        case "DFlashKVInjectionAttention":
            return [_attention(inputs, attributes)]
    raise ShapeError(f"{node.op_type}: the model does not know its shapes")


def _expect(holds: bool, problem: str) -> None:
    if not holds:
        raise ShapeError(problem)


def _broadcast(a: Shape, b: Shape) -> Shape:
    rank = max(len(a), len(b))
    padded = [(ONE,) * (rank - len(shape)) + shape for shape in (a, b)]
    result = []
    for left, right in zip(*padded, strict=True):
        _expect(left.is_same(right) or ONE in (left, right), f"elementwise of {text(a)} and {text(b)}")
        wide = left if right == ONE else right
        result.append(wide._replace(opaque=left.opaque or right.opaque))
    return tuple(result)


def _gemm(a: Shape, b: Shape, attributes: dict[str, int]) -> Shape:
    _expect(len(a) == len(b) == 2, f"Gemm of {len(a)} and {len(b)} axes; the parser takes 2")
    rows, inner = reversed(a) if attributes.get("transA") else a
    inner_b, columns = reversed(b) if attributes.get("transB") else b
    _expect(inner.is_same(inner_b), f"Gemm of {text(a)} and {text(b)}")
    return rows, columns


def _reshape(x: Shape, wanted: list[int]) -> Shape:
    _expect(wanted.count(-1) <= 1 and 0 not in wanted, f"Reshape to {wanted}")
    factor, symbols = prod(extent.factor for extent in x), sorted(sum((extent.symbols for extent in x), ()))
    known = prod(size for size in wanted if size > 0)
    rest = Extent(factor // known, tuple(symbols))
    fits = factor % known == 0 and (-1 in wanted or rest == ONE)
    _expect(fits, f"Reshape of {text(x)} to {wanted}")
    return tuple(rest if size == -1 else Extent(size) for size in wanted)


def _split(x: Shape, axis: int, sizes: list[int]) -> list[Shape]:
    _expect(x[axis].is_same(Extent(sum(sizes))), f"Split of {x[axis]} into {sizes}")
    opaque = any(extent.symbols for extent in x)
    parts = []
    for size in sizes:
        shape = [extent._replace(opaque=opaque) for extent in x]
        shape[axis] = Extent(size, opaque=opaque)
        parts.append(tuple(shape))
    return parts


def _slice(x: Shape, starts: list[int], ends: list[int], axes: list[int]) -> Shape:
    shape = list(x)
    for axis, start, end in zip(axes, starts, ends, strict=True):
        extent = x[axis]
        _expect(not extent.symbols and 0 <= start < end <= extent.factor, f"Slice {start}:{end} of {text(x)}")
        shape[axis] = extent._replace(factor=end - start)
    return tuple(shape)


def _pad(x: Shape, pads: list[int]) -> Shape:
    added = [sum(pair) for pair in zip(pads[: len(x)], pads[len(x) :], strict=True)]
    fits = len(added) == len(x) and not any(extent.symbols and rows for extent, rows in zip(x, added, strict=True))
    _expect(fits, f"Pad of {text(x)} by {pads}")
    return tuple(extent._replace(factor=extent.factor + rows) for extent, rows in zip(x, added, strict=True))


def _top_k(x: Shape, axis: int, count: list[int]) -> Shape:
    """NvInfer.h, ITopKLayer: K of at most 3840, along one static axis."""
    k, extent = prod(count), x[axis]
    fits = not extent.symbols and not extent.opaque and 0 < k <= min(extent.factor, 3840)
    _expect(axis == -1 and fits, f"TopK {k} of {text(x)}")
    return (*x[:-1], Extent(k))


def _concat(inputs: Sequence[Shape], axis: int) -> Shape:
    first = inputs[0]
    axis %= len(first)
    for other in inputs[1:]:
        pairs = [pair for i, pair in enumerate(zip(first, other, strict=False)) if i != axis]
        alike = len(first) == len(other) and all(a.is_same(b) for a, b in pairs)
        _expect(alike, f"Concat of {' and '.join(map(text, inputs))}")
    joined = [shape[axis] for shape in inputs]
    extent = Extent(sum(part.factor for part in joined), joined[0].symbols, any(part.opaque for part in joined))
    return (*first[:axis], extent, *first[axis + 1 :])


def _dequantize(x: Shape, scale: Shape, block_size: int | None, axis: int) -> Shape:
    """One scale, or one for each block of an axis: of the last one by rank 2 at most (NvInfer.h, IDequantizeLayer).

    TensorRT-RTX 1.7.1's builder takes three axes, too, which pairs of INT4 rows have.
    """
    most = 2 if axis == -1 else 3
    _expect(len(scale) <= most, f"a scale of {len(scale)} axes; TensorRT takes {most} at most")
    if block_size is None:
        _expect(prod(extent.factor for extent in scale) == 1, f"one scale for a tensor, found {text(scale)}")
        return x
    blocks = list(x)
    blocks[axis] = Extent(x[axis].factor // block_size)
    fits = len(scale) == len(x) and all(a.is_same(b) for a, b in zip(scale, blocks, strict=True))
    _expect(fits, f"{text(x)} in blocks of {block_size} by scales {text(scale)}")
    return x


def _dynamic_quantize(x: Shape) -> list[Shape]:
    last = x[-1]
    _expect(not last.symbols and not last.opaque, f"the blocked axis of {text(x)} is not static to the parser")
    _expect(last.factor % BLOCK == 0, f"blocks of {BLOCK} in {last}")
    return [x, (*x[:-1], Extent(last.factor // BLOCK))]


def _attention(inputs: Sequence[Shape], attributes: dict[str, int]) -> Shape:
    """The table of plugins/kv_injection_attention/tensors.h."""
    qkv, pointers, table = inputs[0], inputs[4], inputs[6]
    _expect(len(qkv) == 3 and len(pointers) == 1 and len(table) == 2, f"qkv {text(qkv)} and page_table {text(table)}")
    layer = attributes["layer"]
    _expect(layer < pointers[0].factor, f"layer {layer} of {pointers[0]} context_pointers")
    B, S, _ = qkv
    N, G, D = (Extent(attributes[name]) for name in ("num_heads", "num_kv_heads", "head_dim"))
    block = (B, S, Extent((N.factor + 2 * G.factor) * D.factor))
    expected = (block, (D,), (D,), (B, S, D), pointers, (Extent(5),), table, (B,), (B,))
    expected += ((N,),) * (len(inputs) == 10)  # sinks
    for index, (found, wanted) in enumerate(zip(inputs, expected, strict=True)):
        fits = len(found) == len(wanted) and all(a.is_same(b) for a, b in zip(found, wanted, strict=True))
        _expect(fits, f"input {index}: expected {text(wanted)}, found {text(found)}")
    return B, S, Extent(N.factor * D.factor)


def integers(tensor: onnx.TensorProto | None) -> list[int] | None:
    """The values of a small INT64 initializer, such as a shape."""
    if tensor is None or tensor.data_type != onnx.TensorProto.INT64:
        return None
    return [int(value) for value in numpy_helper.to_array(tensor).reshape(-1)]


BITS = {
    TensorProto.FLOAT4E2M1: 4, TensorProto.FLOAT8E4M3FN: 8, TensorProto.UINT8: 8, TensorProto.BFLOAT16: 16,
    TensorProto.FLOAT16: 16, TensorProto.FLOAT: 32, TensorProto.INT4: 4,
}  # fmt: skip
MULTIPLICATIONS = {"Gemm", "MatMul"}


def problems(model: onnx.ModelProto, release: str, directory: Path) -> list[str]:
    """What is wrong with `model`, whose weights lie in `directory`; each begins with a node's or a tensor's name."""
    found = [*Checker(model, release).problems(), *_weights(model.graph, directory)]
    try:
        shapes = infer(model.graph)
    except ShapeError as problem:
        return [*found, str(problem)]
    return [*found, *_outputs(model.graph, shapes), *_fusion(model.graph, shapes)]


def infer(graph: onnx.GraphProto) -> dict[str, Shape]:
    """The shape of every value. Raises ShapeError, with the node's name, at the first that does not fit."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    shapes: dict[str, Shape] = {name: tuple(map(Extent, tensor.dims)) for name, tensor in initializers.items()}
    shapes |= {value.name: declared(value) for value in graph.input}
    for node in graph.node:
        try:
            constants = [integers(initializers.get(name)) for name in node.input]
            outputs = output_shapes(node, [shapes[name] for name in node.input], constants)
        except ShapeError as problem:
            raise ShapeError(f"{node.name}: {problem}") from None
        shapes |= dict(zip(node.output, outputs, strict=True))
    return shapes


def _outputs(graph: onnx.GraphProto, shapes: dict[str, Shape]) -> Iterator[str]:
    for value in graph.output:
        wanted, found = declared(value), shapes[value.name]
        if len(wanted) != len(found) or not all(a.is_same(b) for a, b in zip(wanted, found, strict=True)):
            yield f"{value.name}: declared {text(wanted)}, computed {text(found)}"


def _fusion(graph: onnx.GraphProto, shapes: dict[str, Shape]) -> Iterator[str]:
    """A dequantised value reaches a multiplication with nothing between but, where it is FP4, a Cast.

    Anything else makes the builder compute in BF16 what was to be a GEMM of FP8 or FP4. That Cast is in modelopt's
    export, too: the value has its scales' dtype. A MatMul of more than two axes counts as something between, because
    the parser gives the smaller operand axes by a shuffle.
    """
    int4 = {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.INT4}  # the builder turns it
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    for node in graph.node:
        if node.op_type != "DequantizeLinear" or node.input[0] in int4:
            continue
        is_blocked = any(attribute.name == "block_size" for attribute in node.attribute)
        value = node.output[0]
        users = readers.get(value, [])
        if all(user.op_type == "DequantizeLinear" and user.input[1] == value for user in users):
            continue  # block scales
        if is_blocked and [user.op_type for user in users] == ["Cast"]:
            value = users[0].output[0]
            users = readers.get(value, [])
        for user in users:
            if user.op_type not in MULTIPLICATIONS:
                yield f"{node.name}: {user.op_type} stands between it and a multiplication"
            elif any(len(shapes[name]) != 2 for name in user.input[:2]):
                yield f"{node.name}: a shuffle stands between it and {user.op_type} of more than two axes"


def _weights(graph: onnx.GraphProto, directory: Path) -> Iterator[str]:
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.UINT8:
            yield f"{tensor.name}: UINT8, which the parser makes INT32"
        if not uses_external_data(tensor):
            continue
        place = {entry.key: entry.value for entry in tensor.external_data}
        file, offset, length = directory / place["location"], int(place["offset"]), int(place["length"])
        if length * 8 != prod(tensor.dims) * BITS[tensor.data_type]:
            yield f"{tensor.name}: {length} bytes for {list(tensor.dims)}"
        if Path(place["location"]).name != place["location"]:
            yield f"{tensor.name}: {place['location']} is no file beside the graph"
        elif not file.is_file() or offset + length > file.stat().st_size:
            yield f"{tensor.name}: bytes {offset} to {offset + length} are not in {file.name}"
