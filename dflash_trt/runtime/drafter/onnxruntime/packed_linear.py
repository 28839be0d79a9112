# SPDX-License-Identifier: Apache-2.0
"""Large matrices stay in the engine file's format: `_C`'s operator PackedLinear multiplies with their codes.

It exists for memory and opening time, not for speed: a draft of gpt-oss-120b's shape opens in 1 s with 0.1 GiB of its
own, with FLOAT weights in 6 s with 3 GiB (docs/runtime.md, "A draft's weights"). ONNX Runtime converts the rest, small
matrices and all of them on a GPU, when it folds constants.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dflash_trt.checkpoint.number_formats import BLOCK
from dflash_trt.engine.graph.onnx_builder import PLUGIN_DOMAIN, prune

PACKED_LINEAR = "PackedLinear"
MIN_PACKED = 512
"""Columns from which a matrix is packed; with fewer, the sums across vectors at the end of a row cost too much."""
FORMATS: dict[int, tuple[str, float]] = {
    TensorProto.FLOAT: ("FLOAT", 4.0),
    TensorProto.FLOAT16: ("FLOAT16", 2.0),
    TensorProto.BFLOAT16: ("BFLOAT16", 2.0),
    TensorProto.FLOAT8E4M3FN: ("FP8", 1.0),
    TensorProto.FLOAT4E2M1: ("NVFP4", 0.5),
    TensorProto.INT4: ("INT4", 1.0),  # a byte holds a pair of rows
}
"""The operator's name of an initializer's type, and the bytes of a code."""


class PackedWeight(NamedTuple):
    """A matrix [rows, columns] that lies in a file."""

    codes: TensorProto
    scale: float = 1.0
    """FP8's, or that of NVFP4's block scales."""
    block_scales: TensorProto | None = None


def pack_linear_layers(model: onnx.ModelProto, directory: Path) -> None:
    """Makes a PackedLinear of each Gemm in `model` with a large weight, whose data lies in `directory`."""
    weights = _StoredWeights(model.graph, directory)
    nodes: list[onnx.NodeProto] = []
    initializers: dict[str, TensorProto] = {}
    for node in model.graph.node:
        packed = weights.read_operand(node)
        if not packed or packed[0].codes.dims[1] < MIN_PACKED:
            nodes.append(node)
            continue
        rows = node.input[0]
        if node.op_type == "MatMul":  # the left side is [rows, in] or [B, S, in]
            rows, shape = f"{node.output[0]}/rows", f"{node.output[0]}/shape"
            initializers[shape] = numpy_helper.from_array(np.array([-1, packed[0].codes.dims[1]]), shape)
            nodes.append(helper.make_node("Reshape", [node.input[0], shape], [rows], rows))
        # Joined weights lie apart: their products are joined instead.
        outputs = [f"{node.output[0]}/{i}" for i in range(len(packed))] if len(packed) > 1 else list(node.output)
        for weight, output in zip(packed, outputs, strict=True):
            name, width = FORMATS[weight.codes.data_type]
            inputs = [_as_bytes(weight.codes, width)]
            if weight.block_scales is not None:
                inputs.append(_as_bytes(weight.block_scales, FORMATS[weight.block_scales.data_type][1]))
            initializers |= {tensor.name: tensor for tensor in inputs}
            names = [rows, *(tensor.name for tensor in inputs)]
            format_and_scale: dict[str, Any] = {"format": name, "scale": weight.scale}
            nodes.append(
                helper.make_node(PACKED_LINEAR, names, [output], output, domain=PLUGIN_DOMAIN, **format_and_scale)
            )
        if len(packed) > 1:
            nodes.append(helper.make_node("Concat", outputs, node.output, axis=-1))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(initializers.values())
    prune(model.graph)
    if all(imported.domain != PLUGIN_DOMAIN for imported in model.opset_import):
        model.opset_import.append(helper.make_opsetid(PLUGIN_DOMAIN, 1))


def _is_linear(node: onnx.NodeProto) -> bool:
    """Whether it is x times the transpose of a weight, and nothing else: as `linear` writes it."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    return node.op_type == "Gemm" and len(node.input) == 2 and attributes == {"transB": 1}


def _as_bytes(codes: TensorProto, width: float) -> TensorProto:
    """`codes` as UINT8 [rows, bytes of a row]."""
    data = TensorProto(name=f"{codes.name}/bytes", data_type=TensorProto.UINT8, data_location=TensorProto.EXTERNAL)
    data.dims.extend([codes.dims[0], int(codes.dims[1] * width)])
    data.external_data.extend(codes.external_data)
    return data


class _StoredWeights:
    """Values that a graph computes from matrices in files alone, by casts, joining and dequantising."""

    def __init__(self, graph: onnx.GraphProto, directory: Path) -> None:
        self._directory = str(directory)
        self._initializers = {initializer.name: initializer for initializer in graph.initializer}
        self._producers = {output: node for node in graph.node for output in node.output}

    def read_operand(self, node: onnx.NodeProto) -> list[PackedWeight] | None:
        """The matrices that `node` multiplies its input with; None where it is no linear layer on such."""
        if node.op_type == "MatMul":
            return self._read_int4(node.input[1])
        return self.read(node.input[1]) if _is_linear(node) else None

    def _read_int4(self, name: str) -> list[PackedWeight] | None:
        """The matrix whose transpose is `name`, where `linear` made that of INT4."""
        producer = self._producers.get(name)
        while producer is not None and producer.op_type in ("Transpose", "Reshape"):
            producer = self._producers.get(producer.input[0])
        if producer is None or producer.op_type != "DequantizeLinear":
            return None
        codes = self._initializers.get(producer.input[0])
        if codes is None or codes.data_type != TensorProto.INT4 or codes.data_location != TensorProto.EXTERNAL:
            return None
        scales = producer.input[1]
        while scales not in self._initializers:
            scales = self._producers[scales].input[0]
        return [PackedWeight(codes, block_scales=self._initializers[scales])]

    def read(self, name: str) -> list[PackedWeight] | None:
        """The matrices that are joined along axis 0 in the value `name`; None for any other value."""
        if (stored := self._matrix(name)) is not None:
            return [PackedWeight(stored)]
        if (node := self._producers.get(name)) is None:
            return None
        match node.op_type:
            case "Cast":  # to the compute dtype, which is FLOAT here
                return self.read(node.input[0])
            case "Concat":
                parts = [self.read(part) for part in node.input]
                return None if None in parts else [weight for part in parts for weight in part or ()]
            case "DequantizeLinear" if (codes := self._matrix(node.input[0])) is not None:
                if codes.data_type == TensorProto.FLOAT8E4M3FN:
                    return [PackedWeight(codes, self._scalar(node.input[1]))]
                scales = self._producers[node.input[1]].input
                assert [attribute.i for attribute in node.attribute if attribute.name == "block_size"] == [BLOCK]
                return [PackedWeight(codes, self._scalar(scales[1]), self._initializers[scales[0]])]
        return None

    def _matrix(self, name: str) -> TensorProto | None:
        stored = self._initializers.get(name)
        is_matrix = stored is not None and len(stored.dims) == 2 and stored.data_location == TensorProto.EXTERNAL
        return stored if is_matrix and stored is not None and stored.data_type in FORMATS else None

    def _scalar(self, name: str) -> float:
        return float(numpy_helper.to_array(self._initializers[name], self._directory))
