# SPDX-License-Identifier: Apache-2.0
"""An ONNX graph as a list of torch calls; values that depend on weights alone are computed once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dflash_trt.engine.graph.draft_graph import ATTENTION
from dflash_trt.errors import EngineError
from dflash_trt.runtime.drafter.torch.attention_node import attention_call
from dflash_trt.runtime.drafter.torch.calls import Call, fused
from dflash_trt.runtime.drafter.torch.onnx_graph import HINT, UNPACK, Node, OnnxGraph, Pattern
from dflash_trt.runtime.drafter.torch.operators import OPERATORS, dequantize, unpacked

PRODUCTS_AND_CHOICES = ("Gemm", "MatMul", "ArgMax", "TopK")


class Program:
    """The calls of a graph, in order, and the constants that they read."""

    def __init__(self, graph: OnnxGraph, outputs: Collection[str], patterns: Sequence[Pattern] = ()) -> None:
        """Raises EngineError, naming file and node, for an operator that has no function here."""
        self.outputs = tuple(outputs)
        self.constants = dict(graph.constants)
        calls = [call for node in graph.nodes for call in calls_of(graph, node, patterns)]
        needed = _needed(calls, self.outputs)
        self.has_dequantised = any(
            call.operator is unpacked or (call.operator is dequantize and call.inputs[0] in self.constants)
            for call in needed
        )
        """Whether weights were dequantised because no pattern multiplies their codes."""
        self.calls = self._folded(needed)
        self._keep_what_is_read()

    def _folded(self, calls: Sequence[Call]) -> list[Call]:
        """The calls that depend on inputs; all others are computed now."""
        left: list[Call] = []
        last = {name: index for index, call in enumerate(calls) for name in call.inputs}
        with torch.inference_mode(mode=False), torch.no_grad():
            for index, call in enumerate(calls):
                if call.inputs and all(name in self.constants for name in call.inputs):
                    values = call.function(*(self.constants[name] for name in call.inputs))
                    self.constants |= zip(call.outputs, [values] if isinstance(values, Tensor) else values, strict=True)
                else:
                    left.append(call)
                    last |= dict.fromkeys(call.inputs, len(calls))
                for name in call.inputs:
                    if last[name] == index and name not in self.outputs:  # memory that nothing reads again
                        self.constants.pop(name, None)
        return left

    def _keep_what_is_read(self) -> None:
        """Drops constants that no call reads, and notes the last call that reads each other value."""
        last = {name: index for index, call in enumerate(self.calls) for name in (*call.outputs, *call.inputs)}
        kept = {*self.outputs, *self.constants}
        self.constants = {name: value for name, value in self.constants.items() if name in {*last, *self.outputs}}
        self._done: list[list[str]] = [[] for _ in self.calls]
        for name, index in last.items():
            if name not in kept:
                self._done[index].append(name)

    def fuse(self, left: Collection[Callable[..., Any]] = ()) -> None:
        """Fuses the operators between linear layers and attention, but for those in `left`."""
        self.calls = fused(self.calls, self.outputs, left)
        self._keep_what_is_read()

    def run(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs for inputs by name."""
        there = {**self.constants, **values}
        for call, done in zip(self.calls, self._done, strict=True):
            results = call.function(*(there[name] for name in call.inputs))
            there |= zip(call.outputs, [results] if isinstance(results, Tensor) else results, strict=True)
            for name in done:
                del there[name]
        return {name: there[name] for name in self.outputs}


def calls_of(graph: OnnxGraph, node: Node, patterns: Sequence[Pattern] = ()) -> list[Call]:
    """The calls that compute a node. Raises EngineError, naming file and node, for an operator without a function."""
    for pattern in patterns:
        if (calls := pattern(graph, node)) is not None:
            return calls
    try:
        return [_call(graph, node)]
    except (TypeError, ValueError) as problem:
        raise EngineError(
            f"{graph.file}: node {node.name}: expected an operator that the torch executor computes,"
            f" found {node.op_type} ({problem})",
            hint=HINT,
        ) from None


def _call(graph: OnnxGraph, node: Node) -> Call:
    """The call of one operator. Raises TypeError or ValueError for one without a function, or with other attributes."""
    if node.op_type == UNPACK:
        return Call(partial(unpacked, **node.attributes), node.inputs, node.outputs)
    if node.op_type == ATTENTION:
        return Call(attention_call(node.attributes), node.inputs, node.outputs)
    if (operator := OPERATORS.get(node.op_type)) is None:
        raise TypeError("it has no function here")
    count = operator.num_tensors
    tensors, constants = node.inputs[:count], node.inputs[count:] if count is not None else ()
    if len(constants) > len(operator.constants):
        raise TypeError(f"{len(node.inputs)} inputs")
    keywords = dict(node.attributes)
    for name, value in zip(operator.constants, constants, strict=False):
        if value not in graph.constants:
            raise TypeError(f"{name} is computed")
        keywords[name] = tuple(int(number) for number in graph.constants[value].reshape(-1).tolist())
    inspect.signature(operator.function).bind(*tensors, **keywords)
    is_elementwise = node.op_type not in PRODUCTS_AND_CHOICES
    return Call(partial(operator.function, **keywords), tensors, node.outputs, is_elementwise)


def _needed(calls: Sequence[Call], outputs: Collection[str]) -> list[Call]:
    """The calls that the outputs depend on."""
    read, needed = set(outputs), list[Call]()
    for call in reversed(calls):
        if not read.isdisjoint(call.outputs):
            needed.append(call)
            read |= set(call.inputs)
    return needed[::-1]
