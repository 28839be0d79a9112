# SPDX-License-Identifier: Apache-2.0
"""The layers that TensorRT compiled from a graph, with the number formats in which they multiply by weights.

Read from the builder's VERBOSE log, which needs no GPU, or from the engine inspector, which does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import onnx

FORMATS = {"BFloat16": "BF16", "BF16": "BF16", "FP8": "FP8", "FP4E2M1": "FP4", "FP4": "FP4", "Int4": "INT4"}
LAYER = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<kind>\w+), (?P<rest>.*)$")
TENSOR = re.compile(r"Dimensions: \[(?P<axes>[^\]]*)\].*?(?:Datatype|Format/Datatype): (?P<format>[\w ]+)")
HASH = re.compile(r"(_U\d+)?_myl\d+_\d+$")
LOW = {"FP8", "FP4", "INT4"}


class Layer(NamedTuple):
    """One layer, which is a kernel or less."""

    name: str
    kind: str
    """gemm, runtime_fusion (a GEMM with what follows it), kgen (a generated kernel), custom_layer, ..."""
    inputs: tuple[str, ...]
    """Number formats of those inputs that are computed."""
    weights: tuple[str, ...]
    """Number formats of constant matrices."""
    nodes: tuple[str, ...]
    """ONNX nodes that it computes."""

    @property
    def multiplies(self) -> bool:
        """Whether it is a GEMM: a generated kernel names one, too, where it prepares its operands."""
        return self.kind in ("gemm", "runtime_fusion") and any(map(is_gemm, self.nodes))

    @property
    def operands(self) -> str:
        """'FP8 x FP8'; 'BF16 x computed' where the weights come from another layer."""
        first = next((found for found in self.inputs if found in LOW), "BF16")
        return f"{first} x {self.weights[0] if self.weights else 'computed'}"

    @property
    def label(self) -> str:
        """The layer's operation, without the compiler's numbers."""
        if self.multiplies:
            return f"GEMM {self.operands}"
        if self.kind == "custom_layer":
            return "attention"
        return f"{self.kind} {HASH.sub('', self.name).removeprefix('__myl_')}" if self.kind == "kgen" else self.kind


def is_gemm(node: str) -> bool:
    """Whether the name of an ONNX node is that of a linear layer: a Gemm, or INT4's MatMul."""
    return re.fullmatch(r"(.*/)?(Gemm|MatMul)(_\d+)?", node) is not None


def logged_layers(messages: Iterable[str]) -> list[Layer]:
    """Layers of the last plan in the builder's VERBOSE messages."""
    text = [message for message in messages if message.startswith("Layers:")][-1]
    found = (LAYER.match(line.removeprefix("Layers:").strip()) for line in text.splitlines())
    return [_logged(match) for match in found if match is not None]


def _logged(match: re.Match[str]) -> Layer:
    given, _, rest = match["rest"].partition("Outputs: [")
    inputs, _, constants = given.partition("Constants: [")
    return Layer(
        match["name"], match["kind"], tuple(_formats(inputs)), tuple(_formats(constants, matrices=True)),
        tuple(re.findall(r"\[ONNX Layer: ([^\]]*)\]", rest)),
    )  # fmt: skip


def _formats(tensors: str, *, matrices: bool = False) -> Iterator[str]:
    for tensor in tensors.split("{ Name: ")[1:]:
        match = TENSOR.search(tensor)
        if match is not None and not (matrices and match["axes"].count(",") == 0):
            yield from (FORMATS[word] for word in match["format"].split() if word in FORMATS)


def inspected_layers(information: str) -> list[Layer]:
    """Layers in an engine inspector's JSON, of a plan with detailed verbosity."""
    return [_inspected(layer) for layer in json.loads(information)["Layers"] if isinstance(layer, dict)]


def _inspected(layer: dict[str, Any]) -> Layer:
    def formats(key: str, *, matrices: bool = False) -> tuple[str, ...]:
        tensors = (tensor for tensor in layer.get(key, []) if not (matrices and len(tensor.get("Dimensions", [])) < 2))
        words = (str(tensor.get("Format/Datatype", tensor.get("Datatype", ""))).split() for tensor in tensors)
        return tuple(FORMATS[word] for found in words for word in found if word in FORMATS)

    nodes = re.findall(r"\[ONNX Layer: ([^\]]*)\]", str(layer.get("Metadata", "")))
    kind = str(layer.get("LayerType", ""))
    return Layer(str(layer.get("Name", "")), kind, formats("Inputs"), formats("Constants", matrices=True), tuple(nodes))


def summary(layers: Sequence[Layer]) -> list[str]:
    """'12 GEMM FP8 x FP8', ...: how often which layer, in the order of their first."""
    return [f"{count} {label}" for label, count in Counter(layer.label for layer in layers).items()]


def num_kernels(layers: Sequence[str]) -> int:
    """Kernels of a summary; a shape_call is none."""
    return sum(int(line.split()[0]) for line in layers if not line.endswith("shape_call"))


def unfused(layers: Sequence[Layer], graph: Path) -> list[str]:
    """Quantised Gemm nodes of an ONNX graph that no layer multiplies as they are, with what does in their place."""
    made_by = {}
    problems = []
    nodes = onnx.load(graph, load_external_data=False).graph.node
    for node in nodes:
        made_by.update(dict.fromkeys(node.output, node))
    for node in nodes:
        if node.op_type not in ("Gemm", "MatMul"):
            continue
        wanted = [_is_dequantised(made_by.get(name), made_by) for name in node.input[:2]]
        holding = [layer for layer in layers if layer.multiplies and node.name in layer.nodes]
        if not any(wanted):
            continue
        lows = [[any(f in LOW for f in layer.inputs), any(f in LOW for f in layer.weights)] for layer in holding]
        if len(holding) != 1 or any(want and not low for want, low in zip(wanted, lows[0], strict=True)):
            problems.append(f"{node.name}: {', '.join(layer.operands for layer in holding) or 'no GEMM'}")
    return problems


def _is_dequantised(node: onnx.NodeProto | None, made_by: dict[str, onnx.NodeProto]) -> bool:
    while node is not None and node.op_type in ("Cast", "Transpose", "Reshape"):
        node = made_by.get(node.input[0])
    return node is not None and node.op_type == "DequantizeLinear"
