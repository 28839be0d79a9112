# SPDX-License-Identifier: Apache-2.0
"""The two graphs as TensorRT plans: one launch a call, everything bound once. Not yet run with libnvinfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_trt.engine.executor import AllReduce, DraftInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans.launcher import Launcher
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.plan_loader import PlanLoader, PlanRunner, SegmentedPlan
from dflash_trt.engine.signatures import MAX_CONTEXT, PAGE_SIZES, TOKENS_PER_PAGE, num_pages_for, segment_name
from dflash_trt.errors import EngineError
from dflash_trt.files.command import quoted

ALIGNMENT = 16


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


class TensorRTExecutor:
    """An Executor on one GPU. Calls smaller than a profile are padded, calls larger than all are queued in parts."""

    def __init__(
        self, directory: Path, manifest: Manifest, launcher: Launcher, all_reduce: AllReduce | None = None
    ) -> None:
        """`manifest` is that of `directory`, read and checked by `read_manifest`.

        A shard needs an `all_reduce`. Raises EngineError without plans.
        """
        for name in manifest.graphs:
            if name not in manifest.plans:
                raise EngineError(
                    f"{directory}: expected {name}.plan, found an engine for ONNX Runtime only",
                    hint=f"on the GPU machine: dflash-trt build --plans-for {quoted(directory)}",
                )
        assert (manifest.shard is None) == (all_reduce is None), "a shard needs an all_reduce"
        self._all_reduce = all_reduce
        # The graph that takes the block.
        self._first = manifest.plans["draft" if all_reduce is None else segment_name(0)]
        self.cache_dtype = torch.float8_e4m3fn if manifest.quantization.fp8_kv_cache else torch.bfloat16
        self._directory = directory
        self._manifest = manifest
        self._launcher = launcher
        self._loader: PlanLoader | None = None
        self._context: PlanRunner | None = None
        self._draft: PlanRunner | SegmentedPlan | None = None

    @property
    def device(self) -> torch.device:
        """Torch's current GPU, onto which TensorRT loads a plan."""
        return self._launcher.device

    def cache_rows(self, num_slots: int) -> int:
        """max_seq_len of the plans. Raises EngineError for more slots than the draft plan was built for."""
        self._check_slots(num_slots)
        return (self._manifest.plan_options or PlanOptions()).max_seq_len

    def check(self) -> None:
        """Checks the plans without reading them.

        Raises MissingDependencyError without GPU, TensorRT or plugin, EngineError when the plans were built for another
        machine or TensorRT.
        """
        self._loader = self._loader or PlanLoader(self._directory, self._manifest, self._launcher)

    def load(self) -> None:
        """Reads the context plan. Raises what `check` does, and EngineError when TensorRT refuses the plan."""
        self.check()
        assert self._loader is not None, "as check leaves it"
        self._context = self._context or self._loader.load("context", "T", {})

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Passes the caches' addresses and strides to the draft plan."""
        is_paged = k_cache.shape[2] == TOKENS_PER_PAGE  # else a page is a slot
        max_pages = num_pages_for(self.cache_rows(1)) if is_paged else 1
        self._bind(ContextLayout.of_caches(k_cache, v_cache), max_pages)

    def bind_pool(self, layers: Sequence[Tensor], max_pages: int) -> None:
        """Passes the pool's addresses and strides to the draft plan."""
        self._bind(ContextLayout.of_layers(layers), max_pages)

    def _bind(self, context: ContextLayout, max_pages: int) -> None:
        """Loads the draft plan, or only updates addresses and strides where the page table keeps its shape."""
        assert self._loader is not None, "load comes first"
        context.check(max_pages)
        values = {"context_pointers": context.pointers, "context_layout": context.layout}
        tensors = {name: torch.tensor(value, device=self.device) for name, value in values.items()}
        shape = (self._first.profiles[-1]["B"].max, max_pages)
        if self._draft is not None and self._draft.tensors["page_table"].shape == shape:
            with self._launcher.queued():
                for name, value in tensors.items():
                    self._draft.tensors[name].copy_(value)
            return
        self._close()
        tensors["page_table"] = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._draft = self._load_draft(self._loader, tensors)
        rows = self._draft.tensors["slot_ids"]  # block b's pages are row b of the page table
        rows.copy_(torch.arange(len(rows), device=self.device))

    def _load_draft(self, loader: PlanLoader, cached: Mapping[str, Tensor]) -> PlanRunner | SegmentedPlan:
        if self._all_reduce is None:
            return loader.load("draft", "B", cached)
        return SegmentedPlan(loader, self._manifest.draft.num_layers, cached, self._all_reduce)

    def release(self) -> None:
        """Drops the draft plan, as two plans or two caches need not fit the GPU."""
        self._close()

    def _close(self) -> None:
        if self._draft is not None:
            self._draft.close()
        self._draft = None

    def context(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, L, G, D] in the cache's dtype."""
        plan = self._loaded_context()
        T, most = len(taps), plan.sizes[-1]
        with self._launcher.queued():
            if most >= T:
                return self._context_part(taps, positions)
            buffers = (plan.tensors["k"], plan.tensors["v"])
            k, v = (buffer.new_empty(T, *buffer.shape[1:]) for buffer in buffers)
            for begin in range(0, T, most):
                part = slice(begin, begin + most)
                k[part], v[part] = self._context_part(taps[part], positions[part])
            return k, v

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
        most = draft.sizes[-1]
        with self._launcher.queued():
            parts = [
                _draft_part(draft, DraftInputs(*(tensor[begin : begin + most] for tensor in inputs)), outputs)
                for begin in range(0, len(inputs.page_ids), most)
            ]
            return parts[0] if len(parts) == 1 else [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def _context_part(self, taps: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        T, plan = len(taps), self._loaded_context()
        tensors = plan.tensors
        tensors["target_hidden"][:T].copy_(taps)
        tensors["positions"][:T].copy_(positions)
        plan.run(T)
        return tensors["k"][:T], tensors["v"][:T]

    def _loaded_context(self) -> PlanRunner:
        assert self._context is not None, "load comes first"
        return self._context

    def _bound_draft(self) -> PlanRunner | SegmentedPlan:
        assert self._draft is not None, "bind comes first"
        return self._draft

    def _check_slots(self, num_slots: int) -> None:
        most = self._first.profiles[0]["slots"].max
        if num_slots > most:
            raise EngineError(
                f"{self._directory}: expected at most {most} slots, for which the plan was built, found {num_slots}",
                hint=f"dflash-trt build --plans-for {quoted(self._directory)} --max-batch-size {num_slots}",
            )


def _draft_part(
    draft: PlanRunner | SegmentedPlan, inputs: DraftInputs, outputs: Mapping[str, torch.dtype]
) -> list[Tensor]:
    B, tensors = len(inputs.page_ids), draft.tensors
    tensors["page_table"][:B, : inputs.page_ids.shape[1]].copy_(inputs.page_ids)
    for name in ("noise_embeds", "positions", "context_lengths"):
        tensors[name][:B].copy_(getattr(inputs, name))
    tensors["context_lengths"][B : B + draft.padding(B)].zero_()  # blocks without context read no cache
    draft.run(B)
    return [tensors[name][:B].to(dtype, copy=True) for name, dtype in outputs.items()]
