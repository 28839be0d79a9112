# SPDX-License-Identifier: Apache-2.0
"""correlator.onnx in FLOAT, with gradients to its weights and inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from onnx import TensorProto

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.engine.executor import CorrelatorInputs
from dflash_trt.engine.graph.correlator_graph import correlator_graph
from dflash_trt.runtime.drafter.onnxruntime.lowering import lower_to_cpu
from dflash_trt.runtime.drafter.torch.graph_program import Program
from dflash_trt.runtime.drafter.torch.onnx_graph import OnnxGraph
from dflash_trt.runtime.drafter.torch.stored_weights import StoredWeights

SCORES = "candidate_scores"


class Correlator:
    """The graph that engines run, whose weights are inputs here."""

    def __init__(self, draft: DraftCheckpoint, device: torch.device) -> None:
        """`draft` is a dense LiLiCorr draft."""
        spec, model = draft.spec, lower_to_cpu(correlator_graph(draft))
        self._num_slots = spec.num_draft_tokens
        stored = [i for i in model.graph.initializer if i.data_location == TensorProto.EXTERNAL]
        self._weights = [initializer.name for initializer in stored]
        for initializer in stored:
            model.graph.initializer.remove(initializer)
        graph = OnnxGraph(draft.directory, "correlator.onnx", StoredWeights(Path(), device), model)
        self._program = Program(graph, [SCORES])

    def scores(self, weights: Mapping[str, torch.Tensor], inputs: CorrelatorInputs) -> torch.Tensor:
        """[B, K, k, k] FLOAT with the weights FLOAT, by tensor name without `.weight`."""
        values = {name: _stacked(weights, name) for name in self._weights}
        return self._program.run(values | inputs.padded(self._num_slots))[SCORES]


def _stacked(weights: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """An initializer [rows, ...], which GraphBuilder names after the tensors in it."""
    parts = [weights[part.removesuffix(".weight")] for part in name.split("|")]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
