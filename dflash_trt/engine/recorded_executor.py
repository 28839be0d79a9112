# SPDX-License-Identifier: Apache-2.0
"""An executor whose graphs are recorded once for each of their sizes, on addresses that stay: TensorRT's, and torch's.

Calls smaller than a size are padded, calls larger than all are queued in parts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from dflash_trt.device.launcher import Launcher
from dflash_trt.engine.executor import DraftInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.signatures import MAX_CONTEXT, PAGE_SIZES, TOKENS_PER_PAGE, Graph, Port
from dflash_trt.errors import EngineError

if TYPE_CHECKING:
    from dflash_trt.engine.plans.plan_loader import SegmentedPlan

ALIGNMENT = 16
DTYPES = {
    "BFLOAT16": torch.bfloat16, "FLOAT": torch.float32, "FLOAT8E4M3FN": torch.float8_e4m3fn, "INT32": torch.int32,
    "INT64": torch.int64,
}  # fmt: skip


class ContextLayout(NamedTuple):
    """The inputs context_pointers and context_layout (docs/kv_injection.md)."""

    pointers: tuple[int, ...]
    """[L]: addresses of the first page's K."""
    page_size: int
    page_stride: int
    """From a page to the next of one layer; all strides are in bytes."""
    kv_stride: int
    row_stride: int
    head_stride: int

    @classmethod
    def of_caches(cls, k_cache: Tensor, v_cache: Tensor) -> ContextLayout:
        """Layout of K and V [pages, L, rows, G, D]; a dense cache has one page a slot."""
        page, layer, row, head, _ = (stride * k_cache.itemsize for stride in k_cache.stride())
        first, L = k_cache.data_ptr(), k_cache.shape[1]
        pointers = tuple(range(first, first + L * layer, layer))
        return cls(pointers, k_cache.shape[2], page, v_cache.data_ptr() - first, row, head)

    @classmethod
    def of_layers(cls, layers: Sequence[Tensor]) -> ContextLayout:
        """Layout of views [pages, 2, G, rows, D], one a layer, with equal strides."""
        page, kv, head, row, _ = (stride * layers[0].itemsize for stride in layers[0].stride())
        return cls(tuple(layer.data_ptr() for layer in layers), layers[0].shape[3], page, kv, row, head)

    def check(self, num_pages: int) -> None:
        """Raises EngineError for a layout that the plugin rejects with a page table of `num_pages` columns.

        The plugin itself could only answer NaN: layouts are on the GPU.
        """
        sizes = PAGE_SIZES if num_pages > 1 else range(1, MAX_CONTEXT + 1)
        if self.page_size not in sizes:
            expected = "16, 32 or 64" if num_pages > 1 else f"at most {MAX_CONTEXT}"
            raise EngineError(f"context cache: expected pages of {expected} rows, found {self.page_size}")
        if odd := [value for value in (*self.pointers, *self.layout[1:]) if value % ALIGNMENT]:
            raise EngineError(f"context cache: expected addresses and strides that {ALIGNMENT} divides, found {odd[0]}")

    @property
    def layout(self) -> tuple[int, ...]:
        """The input context_layout: page size and strides."""
        return self[1:]


def graph_tensors(
    graph: Graph, axes: Mapping[str, int], there: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Inputs and outputs of a graph by name, where its dynamic axes have these sizes; those not `there` are zeros."""

    def tensor(port: Port) -> Tensor:
        return torch.zeros(port.sizes(axes), dtype=DTYPES[port.dtype], device=device)

    ports = (*graph.inputs, *graph.outputs)
    return {port.name: there[port.name] if port.name in there else tensor(port) for port in ports}


class RecordedGraph:
    """One graph with a call for each of its sizes, whose leading axis is fixed.

    All use the leading rows of the same tensors.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], sizes: Sequence[int], record: Callable[[int], Callable[[], None]]
    ) -> None:
        """`tensors` are inputs and outputs by name, sized for the largest of the rising `sizes`."""
        self.tensors = tensors
        """Inputs and outputs, by name."""
        self.sizes = sizes
        """Rows of each call, rising."""
        self._calls = [record(rows) for rows in sizes]

    def padding(self, rows: int) -> int:
        """Rows that `run` computes beyond `rows`."""
        return self.sizes[bisect_left(self.sizes, rows)] - rows

    def run(self, rows: int) -> None:
        """Queues the smallest call that has `rows` rows."""
        self._calls[bisect_left(self.sizes, rows)]()

    def close(self) -> None:
        """Frees the graph now; in its reference cycles it would wait for Python's garbage collector."""
        self._calls.clear()
        self.tensors = {}


class RecordedExecutor:
    """What both executors share; a subclass loads the graphs."""

    def __init__(self, manifest: Manifest, launcher: Launcher) -> None:
        self.cache_dtype = torch.float8_e4m3fn if manifest.quantization.fp8_kv_cache else torch.bfloat16
        self._manifest = manifest
        self._launcher = launcher
        self._context: RecordedGraph | None = None
        self._draft: RecordedGraph | SegmentedPlan | None = None

    @property
    def device(self) -> torch.device:
        """The launcher's, which all tensors are on."""
        return self._launcher.device

    def load(self) -> None:
        """Reads the context graph. Raises EngineError where it cannot be loaded."""
        self._context = self._context or self._load_context()

    def _load_context(self) -> RecordedGraph:
        """The context graph, with a call for each number of rows."""
        raise NotImplementedError

    def _load_draft(self, cached: Mapping[str, Tensor]) -> RecordedGraph | SegmentedPlan:
        """The draft graph, with a call for each number of blocks; `cached` is where the context lies."""
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
        """Drops the draft graph, as two of them or two caches need not fit the GPU."""
        if self._draft is not None:
            self._draft.close()
        self._draft = None

    def close(self) -> None:
        """Drops both graphs."""
        self.release()
        if self._context is not None:
            self._context.close()
        self._context = None

    def context(self, taps: Tensor, positions: Tensor) -> Tensor:
        """kv [T, 2, L, G, D] in the cache's dtype."""
        graph = self._loaded_context()
        T, most = len(taps), graph.sizes[-1]
        with self._launcher.queued():
            if most >= T:
                return self._context_part(taps, positions)
            buffer = graph.tensors["kv"]
            kv = buffer.new_empty(T, *buffer.shape[1:])
            for begin in range(0, T, most):
                part = slice(begin, begin + most)
                kv[part] = self._context_part(taps[part], positions[part])
            return kv

    def draft(self, inputs: DraftInputs) -> Tensor:
        """hidden [B, S, H]."""
        return self._run_draft(inputs, {"hidden": inputs.noise_embeds.dtype})[0]

    def propose(self, inputs: DraftInputs) -> Tensor:
        """Proposals [B, K]."""
        return self._run_draft(inputs, {"token_ids": torch.int64})[0]

    def candidates(self, inputs: DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [B, S, H], candidate ids and logits [B, K, k]."""
        dtypes = {"hidden": torch.float32, "candidate_ids": torch.int64, "candidate_logits": torch.float32}
        hidden, ids, logits = self._run_draft(inputs, dtypes)
        return hidden, ids, logits

    def _run_draft(self, inputs: DraftInputs, outputs: Mapping[str, torch.dtype]) -> list[Tensor]:
        draft = self._bound_draft()
        most, pages = draft.sizes[-1], draft.tensors["page_table"].shape[1]
        if inputs.page_ids.shape[1] > pages:
            raise EngineError(
                f"context: expected at most {pages} pages of one request, for which the page table was made,"
                f" found {inputs.page_ids.shape[1]}"
            )
        with self._launcher.queued():
            parts = [
                _draft_part(draft, DraftInputs(*(tensor[begin : begin + most] for tensor in inputs)), outputs)
                for begin in range(0, len(inputs.page_ids), most)
            ]
            return parts[0] if len(parts) == 1 else [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def _context_part(self, taps: Tensor, positions: Tensor) -> Tensor:
        T, graph = len(taps), self._loaded_context()
        tensors = graph.tensors
        tensors["target_hidden"][:T].copy_(taps)
        tensors["positions"][:T].copy_(positions)
        graph.run(T)
        return tensors["kv"][:T]

    def _loaded_context(self) -> RecordedGraph:
        assert self._context is not None, "load comes first"
        return self._context

    def _bound_draft(self) -> RecordedGraph | SegmentedPlan:
        assert self._draft is not None, "bind comes first"
        return self._draft


def _draft_part(
    draft: RecordedGraph | SegmentedPlan, inputs: DraftInputs, outputs: Mapping[str, torch.dtype]
) -> list[Tensor]:
    B, tensors = len(inputs.page_ids), draft.tensors
    tensors["page_table"][:B, : inputs.page_ids.shape[1]].copy_(inputs.page_ids)
    for name in ("noise_embeds", "positions", "context_lengths"):
        tensors[name][:B].copy_(getattr(inputs, name))
    tensors["context_lengths"][B : B + draft.padding(B)].zero_()  # blocks without context read no cache
    draft.run(B)
    return [tensors[name][:B].to(dtype, copy=True) for name, dtype in outputs.items()]
