# SPDX-License-Identifier: Apache-2.0
"""RMSNorm as one node, for ONNX Runtime on a CPU: a node of a small draft takes longer to begin than to compute.

The graphs spell it out, because TensorRT's parser fuses that; onnxruntime 1.31 knows the pattern with a Pow alone.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx
from onnx import helper, numpy_helper

from dflash_trt.graph.pruning import prune


class _Norm(NamedTuple):
    """x / sqrt(mean(x^2) + epsilon) over the last axis."""

    x: str
    epsilon: float


def fuse_norms(graph: onnx.GraphProto) -> None:
    """Makes a RMSNormalization of each `normalize` and `scale` of `layers`, in place."""
    producers = {output: node for node in graph.node for output in node.output}
    initializers = {initializer.name: initializer for initializer in graph.initializer}
    for node in graph.node:
        if node.op_type != "Mul" or not _is_stored(node.input[1], producers, initializers):
            continue
        if (norm := _match(node.input[0], producers, initializers)) is not None:
            inputs = [norm.x, node.input[1]]
            fused = helper.make_node(
                "RMSNormalization", inputs, node.output, name=node.name, axis=-1, epsilon=norm.epsilon
            )
            node.CopyFrom(fused)
    prune(graph)


def _match(value: str, producers: dict[str, onnx.NodeProto], initializers: dict[str, onnx.TensorProto]) -> _Norm | None:
    """The norm that `value` is, if it is one: Div(x, Sqrt(Add(ReduceMean(Mul(x, x), -1), epsilon)))."""
    chain = []
    for op_type, operand in (("Div", 1), ("Sqrt", 0), ("Add", 0), ("ReduceMean", 0), ("Mul", 0)):
        node = producers.get(value)
        if node is None or node.op_type != op_type:
            return None
        chain.append(node)
        value = node.input[operand]
    division, _, addition, mean, square = chain
    x = division.input[0]
    axes, epsilon = (initializers.get(node.input[1]) for node in (mean, addition))
    if list(square.input) != [x, x] or axes is None or epsilon is None or numpy_helper.to_array(axes).tolist() != [-1]:
        return None
    return _Norm(x, float(numpy_helper.to_array(epsilon)))


def _is_stored(value: str, producers: dict[str, onnx.NodeProto], initializers: dict[str, onnx.TensorProto]) -> bool:
    """Whether `value` is made of stored weights alone."""
    if value not in producers:
        return value in initializers
    return all(_is_stored(part, producers, initializers) for part in producers[value].input)
