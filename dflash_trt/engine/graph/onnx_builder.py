# SPDX-License-Identifier: Apache-2.0
"""A small writer of ONNX graphs: nodes are named by their position, weights stay in their own file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.engine.signatures import Port, graph_signatures

OPSET = 23  # FLOAT4E2M1 and Attention; what onnxruntime 1.24 and TensorRT 10.15's parser know
IR_VERSION = 11  # onnxruntime 1.31 refuses IR above 13
PLUGIN_DOMAIN = "dflash_trt"
TRT_DOMAIN = "trt"
COMPUTE = TensorProto.BFLOAT16  # activations on a GPU; taps reach 2e4, so never FLOAT16
STORED_TYPES = {
    "BF16": TensorProto.BFLOAT16,
    "F16": TensorProto.FLOAT16,
    "F32": TensorProto.FLOAT,
    "F8_E4M3": TensorProto.FLOAT8E4M3FN,
}


class GraphBuilder:
    """Collects the nodes and initializers of one graph, whose inputs and outputs its signature declares."""

    def __init__(self, name: str, draft: DraftCheckpoint, *, is_shard: bool = False) -> None:
        self.draft = draft
        self.weights = draft.weights
        self._name = name
        self._scope: list[str] = []
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self.is_shard = is_shard
        self._signature = graph_signatures(draft.spec, draft.quantization, is_shard=is_shard)[name]
        self._used: list[str] = []
        self._uses: dict[str, int] = {}

    def algorithm(self, module: str) -> str | None:
        """How `module` is quantised; None for a dense one."""
        return self.draft.quantization.modules.get(module)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefixes names with `name/`, as in the checkpoint, so that a parser error shows the position."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def input(self, name: str) -> str:
        """The input `name` of the signature."""
        self._used.append(name)
        return name

    def output(self, value: str, name: str) -> None:
        """Makes `value` the output `name` through an Identity: TensorRT's builder would copy a Reshape."""
        if value != name:
            self.named("Identity", value, name=name)
        self._used.append(name)

    def renamed_output(self, value: str, name: str) -> None:
        """Makes `value` the output `name` of the signature where it is made: its builder copies a GEMM's Identity."""
        for node in self._nodes:
            for names in (node.input, node.output):
                names[:] = [name if used == value else used for used in names]
        self._used.append(name)

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: object) -> str:
        """Adds a node with one output and returns the output's name."""
        name = self._unique("/".join([*self._scope, op_type]))
        return self.named(op_type, *inputs, name=name, domain=domain, **attributes)

    def named(self, op_type: str, *inputs: str, name: str, domain: str = "", **attributes: object) -> str:
        """Adds a node whose one output has a given name."""
        self._add(op_type, inputs, [name], name, domain=domain, **attributes)
        return name

    def ops(
        self, op_type: str, inputs: tuple[str, ...], *, num_outputs: int, domain: str = "", **attributes: object
    ) -> list[str]:
        """Adds a node with several outputs and returns their names."""
        name = self._unique("/".join([*self._scope, op_type]))
        outputs = [f"{name}:{i}" for i in range(num_outputs)]
        self._add(op_type, inputs, outputs, name, domain=domain, **attributes)
        return outputs

    def split(self, x: str, sizes: list[int]) -> list[str]:
        """Cuts the last axis of `x` into parts of the given sizes."""
        return self.ops("Split", (x, self.constant(sizes)), num_outputs=len(sizes), axis=-1)

    def reshape(self, x: str, shape: list[int]) -> str:
        """Reshapes `x`; one extent may be -1."""
        return self.op("Reshape", x, self.constant(shape))

    def weight(self, name: str) -> str:
        """A dense tensor of the checkpoint in the compute dtype."""
        return self.stacked([name])

    def stacked(self, names: Sequence[str]) -> str:
        """Dense tensors joined along axis 0, in the compute dtype; no bytes are copied."""
        if len(names) > 1 and not self.adjacent(names):
            return self.op("Concat", *map(self.weight, names), axis=0)
        stored = self.stored(names)
        return stored if self.weights[names[0]].dtype == "BF16" else self.op("Cast", stored, to=COMPUTE)

    def adjacent(self, names: Sequence[str]) -> bool:
        """Whether tensors of one dtype are adjacent in one file, so that they can be read as one tensor."""
        return all(
            (a.file, a.dtype, a.offset + a.num_bytes) == (b.file, b.dtype, b.offset)
            for a, b in pairwise(self.weights[name] for name in names)
        )

    def stored(self, names: Sequence[str], codes: int | None = None) -> str:
        """Adjacent tensors as one initializer of the stored dtype; `codes` is the type of two codes packed in a U8.

        With FLOAT4E2M1, two adjacent codes of a row share a byte; with INT4, two rows do, which adds a last axis of 2.
        """
        name = "|".join(names)
        if name not in self._initializers:
            self._initializers[name] = _external(name, [self.weights[part] for part in names], codes)
        return name

    def constant(self, value: NDArray[np.generic] | list[int] | int | float) -> str:
        """A small constant stored in the graph itself: int64 for integers, float32 for floats."""
        if isinstance(value, (int, list)):
            array: NDArray[np.generic] = np.array(value, dtype=np.int64)
        else:
            array = np.asarray(value, dtype=np.float32) if isinstance(value, float) else value
        return self._inline(numpy_helper.from_array(array))

    def zero(self, dtype: int, count: int | None = None) -> str:
        """A scalar zero of any dtype, or a vector of `count` zeros."""
        dims = [] if count is None else [count]
        return self._inline(helper.make_tensor("", dtype, dims, [0.0] * (count or 1)))

    def model(self) -> onnx.ModelProto:
        """The finished model."""
        inputs, outputs = ([_value_info(port) for port in p] for p in (self._signature.inputs, self._signature.outputs))
        assert sorted(self._used) == sorted(value.name for value in (*inputs, *outputs)), self._used
        graph = helper.make_graph(self._nodes, self._name, inputs, outputs, list(self._initializers.values()))
        domains = sorted({node.domain for node in self._nodes} - {""})
        imports = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(domain, 1) for domain in domains)]
        return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION, producer_name="dflash-trt")

    def _add(self, op_type: str, inputs: Sequence[str], outputs: list[str], name: str, **attributes: object) -> None:
        self._nodes.append(helper.make_node(op_type, inputs, outputs, name=name, **attributes))  # type: ignore[arg-type]

    def _inline(self, proto: TensorProto) -> str:
        proto.name = self._unique("/".join([*self._scope, "constant"]))
        self._initializers[proto.name] = proto
        return proto.name

    def _unique(self, name: str) -> str:
        count = self._uses[name] = self._uses.get(name, -1) + 1
        return name if count == 0 else f"{name}_{count}"


def _value_info(port: Port) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(port.name, TensorProto.DataType.Value(port.dtype), port.shape)


def prune(graph: onnx.GraphProto) -> None:
    """Removes unused nodes and initializers; onnxruntime warns about each of the latter."""
    read = {value.name for value in graph.output}
    nodes: list[onnx.NodeProto] = []
    for node in reversed(graph.node):
        if any(output in read for output in node.output):
            nodes.append(node)
            read |= set(node.input)
    initializers = [initializer for initializer in graph.initializer if initializer.name in read]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(reversed(nodes))
    graph.initializer.extend(initializers)


def _external(name: str, tensors: list[StoredTensor], codes: int | None) -> TensorProto:
    """An initializer with external data: adjacent tensors, joined along axis 0."""
    first = tensors[0]
    columns = first.shape[1:]
    if codes == TensorProto.FLOAT4E2M1:  # shapes count codes, not bytes; low nibbles come first in both
        columns = (*columns[:-1], 2 * columns[-1])
    elif codes == TensorProto.INT4:
        columns = (*columns, 2)
    rows = first.shape[:1] and (sum(tensor.shape[0] for tensor in tensors),)
    data_type = STORED_TYPES[first.dtype] if codes is None else codes
    proto = TensorProto(name=name, data_type=data_type, dims=(*rows, *columns), data_location=TensorProto.EXTERNAL)
    for key, value in (
        ("location", first.file.name),
        ("offset", str(first.offset)),
        ("length", str(sum(tensor.num_bytes for tensor in tensors))),
    ):
        proto.external_data.add(key=key, value=value)
    return proto
