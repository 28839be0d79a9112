# SPDX-License-Identifier: Apache-2.0
"""The two graphs as TensorRT plans: one launch for each size, everything bound once. Not yet run with libnvinfer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dflash_trt.engine.executor import AllReduce, DraftInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.engine.plans.context_layout import ContextLayout
from dflash_trt.engine.plans.launcher import Launcher
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.plan_loader import PlanLoader, SegmentedPlan
from dflash_trt.engine.plans.plan_runner import PlanRunner
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for, segment_name
from dflash_trt.errors import EngineError
from dflash_trt.files.command import quoted


class TensorRTExecutor:
    """An Executor on one GPU. Calls smaller than a profile are padded, calls larger than all are queued in parts."""

    def __init__(
        self, directory: Path, manifest: Manifest, launcher: Launcher, all_reduce: AllReduce | None = None
    ) -> None:
        """`manifest` is that of `directory`, read and checked by `read_manifest`.

        Of a shard, `all_reduce` adds up what the ranks have. Raises EngineError without plans.
        """
        for name in manifest.graphs:
            if name not in manifest.plans:
                raise EngineError(
                    f"{directory}: expected {name}.plan, found an engine for ONNX Runtime only",
                    hint=f"on the GPU machine: dflash-trt build --plans-for {quoted(directory)}",
                )
        assert (manifest.shard is None) == (all_reduce is None), "who shares a drafter adds up"
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
        self._table: Tensor | None = None  # ours, of bound caches; a pool has one of its own

    @property
    def device(self) -> torch.device:
        """Torch's current GPU: TensorRT loads a plan onto that one."""
        return self._launcher.device

    def cache_rows(self, num_slots: int) -> int:
        """What the plans were asked to serve. Raises EngineError for more slots than the draft plan was built for."""
        self._check_slots(num_slots)
        return (self._manifest.plan_options or PlanOptions()).max_seq_len

    def check(self) -> None:
        """Reads no plan. Raises MissingDependencyError without GPU, TensorRT or plugin, EngineError when the plans were
        built for another machine or TensorRT.
        """
        self._loader = self._loader or PlanLoader(self._directory, self._manifest, self._launcher)

    def load(self) -> None:
        """Reads the context plan. Raises what `check` does, and EngineError when TensorRT refuses the plan."""
        self.check()
        assert self._loader is not None, "as check leaves it"
        self._context = self._context or self._loader.load("context", "T", {})

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Tells the draft plan where these caches lie; a call says which pages its blocks have."""
        is_paged = k_cache.shape[2] == TOKENS_PER_PAGE  # else a page is a slot
        shape = (
            self._first.profiles[-1]["B"].max,
            num_pages_for(self.cache_rows(1)) if is_paged else 1,
        )
        if self._table is None or self._table.shape != shape:
            self._table = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self._bind(ContextLayout.of_caches(k_cache, v_cache), self._table)

    def bind_pool(self, layers: Sequence[Tensor], page_table: Tensor) -> None:
        """Tells the draft plan where the pool lies; it reads the page table where that is."""
        self._check_slots(len(page_table))
        self._table = None
        self._bind(ContextLayout.of_layers(layers), page_table)

    def _bind(self, context: ContextLayout, page_table: Tensor) -> None:
        """The plan's calls stay as they are where only addresses and strides are others."""
        assert self._loader is not None, "load comes first"
        context.check(page_table.shape[1])
        values = {"context_pointers": context.pointers, "context_layout": context.layout}
        tensors = {name: torch.tensor(value, device=self.device) for name, value in values.items()}
        if self._draft is not None and self._draft.tensors["page_table"] is page_table:
            with self._launcher.queued():
                for name, value in tensors.items():
                    self._draft.tensors[name].copy_(value)
        else:
            self._close()
            self._draft = self._load_draft(self._loader, {**tensors, "page_table": page_table})

    def _load_draft(self, loader: PlanLoader, cached: Mapping[str, Tensor]) -> PlanRunner | SegmentedPlan:
        if self._all_reduce is None:
            return loader.load("draft", "B", cached)
        return SegmentedPlan(loader, self._manifest.draft.num_layers, cached, self._all_reduce)

    def release(self) -> None:
        """Drops the draft plan with what it was loaded for: two of either need not fit the GPU."""
        self._close()
        self._table = None

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
                _draft_part(
                    draft, DraftInputs(*(tensor[begin : begin + most] for tensor in inputs)), outputs, self._table
                )
                for begin in range(0, len(inputs.slot_ids), most)
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
    draft: PlanRunner | SegmentedPlan, inputs: DraftInputs, outputs: Mapping[str, torch.dtype], table: Tensor | None
) -> list[Tensor]:
    """`table` is the page table where it is ours: it takes each block's pages."""
    B, tensors = len(inputs.slot_ids), draft.tensors
    if table is not None:
        pages = inputs.slot_ids.view(B, -1)
        table[:B, : pages.shape[1]].copy_(pages)
        inputs = inputs._replace(slot_ids=torch.arange(B, device=table.device))
    for name, value in inputs._asdict().items():
        tensors[name][:B].copy_(value)
    if padding := draft.padding(B):
        for name in ("slot_ids", "context_lengths"):  # rows without context cost no reading of the cache
            tensors[name][B : B + padding].zero_()
    draft.run(B)
    return [tensors[name][:B].to(dtype, copy=True) for name, dtype in outputs.items()]
