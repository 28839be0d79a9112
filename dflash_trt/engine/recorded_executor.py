# SPDX-License-Identifier: Apache-2.0
"""An executor whose graphs are recorded once for each of their sizes, on fixed addresses: TensorRT's and torch's.

Calls smaller than a size are padded; calls larger than all sizes are queued in parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dflash_trt.device.launcher import Launcher
from dflash_trt.engine.context_layout import ContextLayout
from dflash_trt.engine.executor import CorrelatorInputs, DraftInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.recorded_graph import SizedGraph
from dflash_trt.engine.signatures import CORRELATOR, TOKENS_PER_PAGE
from dflash_trt.errors import EngineError


class RecordedExecutor:
    """The common part of both executors; a subclass loads the graphs."""

    def __init__(self, manifest: Manifest, launcher: Launcher) -> None:
        self.cache_dtype = torch.float8_e4m3fn if manifest.quantization.fp8_kv_cache else torch.bfloat16
        self._manifest = manifest
        self._launcher = launcher
        self._context: SizedGraph | None = None
        self._draft: SizedGraph | None = None
        self._correlator: SizedGraph | None = None

    @property
    def device(self) -> torch.device:
        """The launcher's device, which holds all tensors."""
        return self._launcher.device

    def load(self) -> None:
        """Reads the graphs that read no context. Raises EngineError where one cannot be loaded."""
        self._context = self._context or self._load_context()
        if CORRELATOR in self._manifest.graphs:
            self._correlator = self._correlator or self._load_correlator()

    def _load_context(self) -> SizedGraph:
        """The context graph, with a call for each number of rows."""
        raise NotImplementedError

    def _load_draft(self, cached: Mapping[str, Tensor]) -> SizedGraph:
        """The draft graph, with a call for each number of blocks; `cached` are the inputs that locate the context."""
        raise NotImplementedError

    def _load_correlator(self) -> SizedGraph:
        """The correlator of a LiLiCorr draft, with a call for each number of blocks."""
        raise NotImplementedError

    def _max_blocks(self) -> int:
        """Blocks of the largest call."""
        raise NotImplementedError

    def _max_pages(self) -> int:
        """Pages of TOKENS_PER_PAGE rows that the longest context takes."""
        raise NotImplementedError

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Passes the caches' addresses and strides to the draft graph."""
        is_paged = k_cache.shape[2] == TOKENS_PER_PAGE  # else a page is a slot
        self._bind(ContextLayout.of_caches(k_cache, v_cache), self._max_pages() if is_paged else 1)

    def bind_pool(self, layers: Sequence[Tensor], max_pages: int) -> None:
        """Passes the pool's addresses and strides to the draft graph."""
        self._bind(ContextLayout.of_layers(layers), max_pages)

    def _bind(self, context: ContextLayout, max_pages: int) -> None:
        """Loads the draft graph, or only updates addresses and strides where the page table keeps its shape."""
        context.check(max_pages)
        values = {"context_pointers": context.pointers, "context_layout": context.layout}
        tensors = {name: torch.tensor(value, device=self.device) for name, value in values.items()}
        shape = (self._max_blocks(), max_pages)
        if self._draft is not None and self._draft.tensors["page_table"].shape == shape:
            with self._launcher.queued():
                for name, value in tensors.items():
                    self._draft.tensors[name].copy_(value)
            return
        self.release()
        tensors["page_table"] = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._draft = self._load_draft(tensors)
        rows = self._draft.tensors["slot_ids"]  # block b's pages are row b of the page table
        rows.copy_(torch.arange(len(rows), device=self.device))

    def release(self) -> None:
        """Drops the draft graph: two of them, or two caches, need not fit into the GPU's memory."""
        if self._draft is not None:
            self._draft.close()
        self._draft = None

    def close(self) -> None:
        """Drops all graphs."""
        self.release()
        for graph in (self._context, self._correlator):
            if graph is not None:
                graph.close()
        self._context = self._correlator = None

    def context(self, taps: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """The context graph's outputs: kv in the cache's dtype, others in BF16."""
        assert self._context is not None, "load comes first"
        graph, T, most = self._context, len(taps), self._context.sizes[-1]
        with self._launcher.queued():
            if most >= T:
                return _run_context(graph, taps, positions)
            buffers = {name: graph.tensors[name] for name in graph.outputs}
            outputs = {name: buffer.new_empty(T, *buffer.shape[1:]) for name, buffer in buffers.items()}
            for begin in range(0, T, most):
                part = slice(begin, begin + most)
                for name, rows in _run_context(graph, taps[part], positions[part]).items():
                    outputs[name][part] = rows
            return outputs

    def draft(self, inputs: DraftInputs) -> dict[str, Tensor]:
        """The draft graph's outputs; hidden in BF16."""
        assert self._draft is not None, "bind comes first"
        graph, B, most = self._draft, len(inputs.page_ids), self._draft.sizes[-1]
        num_pages, max_pages = inputs.page_ids.shape[1], graph.tensors["page_table"].shape[1]
        if num_pages > max_pages:
            raise EngineError(
                f"context: expected at most {max_pages} pages of one request, for which the page table was made,"
                f" found {num_pages}"
            )
        with self._launcher.queued():
            if most >= B:
                return _run_draft(graph, inputs)
            parts: list[dict[str, Tensor]] = []
            for begin in range(0, B, most):
                part = DraftInputs(*(tensor[begin : begin + most] for tensor in inputs))
                parts.append({name: tensor.clone() for name, tensor in _run_draft(graph, part).items()})
            return {name: torch.cat([part[name] for part in parts]) for name in graph.outputs}

    def correlate(self, inputs: CorrelatorInputs) -> Tensor:
        """The correlator's scores."""
        assert self._correlator is not None, "load comes first"
        graph, (B, count) = self._correlator, inputs.slot_hidden.shape[:2]
        most, (output,) = graph.sizes[-1], graph.outputs
        with self._launcher.queued():
            given = inputs.padded(graph.tensors[output].shape[1])
            graph.tensors["num_slots"].copy_(given.pop("num_slots"))
            parts: list[Tensor] = []
            for begin in range(0, B, most):
                rows = min(most, B - begin)
                for name, tensor in given.items():
                    graph.tensors[name][:rows].copy_(tensor[begin : begin + rows])
                graph.run(rows)
                scores = graph.tensors[output][:rows, :count]
                parts.append(scores if most >= B else scores.clone())
            return parts[0] if most >= B else torch.cat(parts)


def _run_context(graph: SizedGraph, taps: Tensor, positions: Tensor) -> dict[str, Tensor]:
    T, tensors = len(taps), graph.tensors
    tensors["target_hidden"][:T].copy_(taps)
    tensors["positions"][:T].copy_(positions)
    graph.run(T)
    return {name: tensors[name][:T] for name in graph.outputs}


def _run_draft(graph: SizedGraph, inputs: DraftInputs) -> dict[str, Tensor]:
    B, tensors = len(inputs.page_ids), graph.tensors
    tensors["page_table"][:B, : inputs.page_ids.shape[1]].copy_(inputs.page_ids)
    for name in ("noise_embeds", "positions", "context_lengths"):
        tensors[name][:B].copy_(getattr(inputs, name))
    tensors["context_lengths"][B : B + graph.padding(B)].zero_()  # blocks without context read no cache
    graph.run(B)
    return {name: tensors[name][:B] for name in graph.outputs}
