# SPDX-License-Identifier: Apache-2.0
"""A rank's draft plan in segments, between which all ranks add up what they have."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dflash_trt.drafter.executor import AllReduce
from dflash_trt.drafter.plan_loader import PlanLoader
from dflash_trt.drafter.plan_runner import PlanRunner, Workspace
from dflash_trt.engine.graphs import num_segments, segment_name, stream_names


class SegmentedPlan:
    """In the place of a PlanRunner for the whole draft graph: same tensors, same sizes."""

    def __init__(
        self, loader: PlanLoader, num_layers: int, cached: Mapping[str, Tensor], all_reduce: AllReduce
    ) -> None:
        """`cached` is where the context lies. Raises EngineError when TensorRT refuses a plan."""
        self._all_reduce = all_reduce
        self._plans: list[PlanRunner] = []
        self.tensors: dict[str, Tensor] = {}
        """Inputs and outputs, by name."""
        workspace = Workspace()
        for i in range(num_segments(num_layers)):
            given = dict(self.tensors)
            if i >= 2:  # the stream goes to and fro between two buffers
                given |= {new: given[old] for old, new in zip(stream_names(i - 1), stream_names(i + 1), strict=True)}
            plan = loader.load(segment_name(i), "B", cached, given, workspace)
            self._plans.append(plan)
            self.tensors |= plan.tensors
        self.sizes = self._plans[0].sizes
        """Blocks of each profile, rising."""

    def padding(self, rows: int) -> int:
        """Blocks that `run` computes beyond `rows`."""
        return self._plans[0].padding(rows)

    def run(self, rows: int) -> None:
        """Queues all segments and the all-reduces between them."""
        computed = rows + self.padding(rows)
        for i, plan in enumerate(self._plans):
            if i:
                _, partial = stream_names(i)
                self._all_reduce(self.tensors[partial][:computed])
            plan.run(rows)

    def close(self) -> None:
        """Frees the plans now."""
        for plan in self._plans:
            plan.close()
        self._plans.clear()
        self.tensors = {}
