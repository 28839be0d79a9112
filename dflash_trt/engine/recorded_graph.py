# SPDX-License-Identifier: Apache-2.0
"""A graph on tensors that stay where they are, with a recorded call for each of its sizes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from dflash_trt.engine.signatures import Graph, Port

DTYPES = {
    "BFLOAT16": torch.bfloat16, "FLOAT": torch.float32, "FLOAT8E4M3FN": torch.float8_e4m3fn, "INT32": torch.int32,
    "INT64": torch.int64,
}  # fmt: skip


class SizedGraph(Protocol):
    """A graph whose calls differ in the size of the leading axis; all use the leading rows of the same tensors."""

    tensors: Mapping[str, Tensor]
    """Inputs and outputs by name, sized for the largest call."""
    outputs: Sequence[str]
    sizes: Sequence[int]
    """Rows of each call, rising."""

    def padding(self, rows: int) -> int:
        """Rows that `run` computes beyond `rows`."""

    def run(self, rows: int) -> None:
        """Queues the smallest call that has `rows` rows."""

    def close(self) -> None:
        """Frees the graph now."""


class RecordedGraph:
    """A SizedGraph whose calls are recorded when it is made."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        outputs: Sequence[str],
        sizes: Sequence[int],
        record: Callable[[int], Callable[[], None]],
    ) -> None:
        """`record` returns the call of one of the rising `sizes`."""
        self.tensors = tensors
        self.outputs = outputs
        self.sizes = sizes
        self._calls = [record(rows) for rows in sizes]

    def padding(self, rows: int) -> int:
        """Rows that `run` computes beyond `rows`."""
        return self.sizes[bisect_left(self.sizes, rows)] - rows

    def run(self, rows: int) -> None:
        """Queues the smallest call that has `rows` rows."""
        self._calls[bisect_left(self.sizes, rows)]()

    def close(self) -> None:
        """Frees the graph now; reference cycles would keep it until Python's garbage collector runs."""
        self._calls.clear()
        self.tensors = {}


def graph_tensors(
    graph: Graph, axes: Mapping[str, int], given: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Inputs and outputs of a graph by name, for these sizes of its dynamic axes; those not `given` are zeros."""

    def tensor(port: Port) -> Tensor:
        return torch.zeros(port.sizes(axes), dtype=DTYPES[port.dtype], device=device)

    ports = (*graph.inputs, *graph.outputs)
    return {port.name: given[port.name] if port.name in given else tensor(port) for port in ports}
