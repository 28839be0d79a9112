# SPDX-License-Identifier: Apache-2.0
"""An ONNX file's nodes, and its initializers on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import helper
from torch import Tensor

from dflash_trt.engine.graph.layers import leave_out_padding
from dflash_trt.errors import EngineError
from dflash_trt.runtime.drafter.torch.calls import Call
from dflash_trt.runtime.drafter.torch.stored_weights import PACKED_TYPES, StoredWeights

HINT = "use --device cpu (without --executor torch), or build the engine again with this version"
UNPACK = "4-bit codes"


class Node(NamedTuple):
    """An operator as the file has it."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    name: str = ""


class OnnxGraph:
    """Nodes and initializers of a file."""

    def __init__(
        self, directory: Path, file: str, weights: StoredWeights, model: onnx.ModelProto | None = None
    ) -> None:
        """Reads `file`, unless `model` is its content.

        Raises EngineError for a file that is no ONNX graph, or whose weights are not where it says.
        """
        self.file = directory / file
        try:
            graph = (model or onnx.load(self.file, load_external_data=False)).graph
        except (DecodeError, OSError) as error:
            raise EngineError(f"{self.file}: expected an ONNX graph, found {error}", hint=HINT) from None
        leave_out_padding(graph)
        self.constants: dict[str, Tensor] = {}
        """Initializers on the device; 4-bit codes as bytes, named by `packed_name`."""
        self.nodes: list[Node] = []
        for initializer in graph.initializer:
            name = initializer.name
            if initializer.data_type in PACKED_TYPES:
                attributes = {"onnx_type": initializer.data_type}
                self.nodes.append(Node(UNPACK, (packed_name(name),), (name,), attributes, name))
                name = packed_name(name)
            self.constants[name] = weights.read(initializer, self.file)
        for node in graph.node:
            attributes = {attribute.name: _value(attribute) for attribute in node.attribute}
            self.nodes.append(Node(node.op_type, tuple(node.input), tuple(node.output), attributes, node.name))
        self.producers = {output: node for node in self.nodes for output in node.outputs}

    def producer(self, name: str, op_type: str) -> Node | None:
        """The node of that type that makes the value `name`; None for any other value."""
        node = self.producers.get(name)
        return node if node is not None and node.op_type == op_type else None


def packed_name(name: str) -> str:
    """Name of an initializer's bytes that hold two codes each."""
    return f"{name}/packed"


def _value(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    return tuple(value) if isinstance(value, list) else value


Pattern = Callable[[OnnxGraph, Node], list[Call] | None]
"""Calls that replace a node and the nodes that only it reads; None if the pattern does not match."""
