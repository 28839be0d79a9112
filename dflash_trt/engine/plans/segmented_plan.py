# SPDX-License-Identifier: Apache-2.0
"""The draft graph of a shard: plans of its segments, with all-reduces between them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dflash_trt.engine.executor import AllReduce
from dflash_trt.engine.plans.plan_loader import PlanLoader
from dflash_trt.engine.plans.plan_runner import PlanRunner, Workspace
from dflash_trt.engine.signatures import num_segments, segment_name, stream_names


class SegmentedPlan:
    """A SizedGraph of a shard's draft plans, which queues an all-reduce between each two."""

    def __init__(
        self, loader: PlanLoader, num_layers: int, cached: Mapping[str, Tensor], all_reduce: AllReduce
    ) -> None:
        """`cached` is where the context lies. Raises EngineError when TensorRT refuses a plan."""
        self._all_reduce = all_reduce
        self._plans: list[PlanRunner] = []
        tensors: dict[str, Tensor] = {}
        workspace = Workspace()
        for i in range(num_segments(num_layers)):
            given = dict(tensors)
            if i >= 2:  # the residual stream alternates between two buffers
                given |= {new: given[old] for old, new in zip(stream_names(i - 1), stream_names(i + 1), strict=True)}
            plan = loader.load(segment_name(i), "B", cached, given, workspace)
            self._plans.append(plan)
            tensors |= plan.tensors
        blocks = tensors["noise_embeds"]
        tensors["hidden"] = tensors["hidden"].flatten()[: blocks.numel()].view_as(blocks)
        self.tensors: Mapping[str, Tensor] = tensors
        self.outputs = self._plans[-1].outputs
        self.sizes = self._plans[0].sizes

    def padding(self, rows: int) -> int:
        """Blocks that `run` computes beyond `rows`."""
        return self._plans[0].padding(rows)

    def run(self, rows: int) -> None:
        """Queues all segments and the all-reduces between them."""
        num_tokens = (rows + self.padding(rows)) * self.tensors["noise_embeds"].shape[1]
        for i, plan in enumerate(self._plans):
            if i:
                _, partial = stream_names(i)
                self._all_reduce(self.tensors[partial][:num_tokens])
            plan.run(rows)

    def close(self) -> None:
        """Frees the plans now."""
        for plan in self._plans:
            plan.close()
        self._plans.clear()
        self.tensors = {}
