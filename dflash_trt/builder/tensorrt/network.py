# SPDX-License-Identifier: Apache-2.0
"""An ONNX graph becomes a strongly typed TensorRT network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash_trt.errors import BuildError


def parse_graph(trt: Any, builder: Any, logger: Any, file: Path) -> Any:
    """The network of `file`, whose weights lie beside it; BuildError names the nodes that the parser refuses."""
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(file)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        raise BuildError(
            f"{file}: expected a graph that TensorRT {trt.__version__} reads, found:"
            + "".join(f"\n  {_describe(error)}" for error in errors),
            hint="choose another --recipe for the layer named above, or another TensorRT version",
        )
    return network


def _describe(error: Any) -> str:
    """Nodes are called like the checkpoint's modules, so the name says which layer it is."""
    node = f"{error.node_name()} ({error.node_operator()}): " if error.node_name() else ""
    return f"{node}{error.desc()}"
