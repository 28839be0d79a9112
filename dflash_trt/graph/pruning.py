# SPDX-License-Identifier: Apache-2.0
"""Leaves nothing in a graph that is not read."""

from __future__ import annotations

import onnx


def prune(graph: onnx.GraphProto) -> None:
    """Removes nodes and initializers of which nothing is read; of the latter onnxruntime warns one by one."""
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
