# SPDX-License-Identifier: Apache-2.0
"""Calls a drafter as TensorRT-LLM's DFlash worker does, in its order and with its cache, on the CPU.

Written from NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/speculative/dflash.py at 414ba69f42c2, attention backend VANILLA:
K + 1 rows of taps for every request in every step, those that were not accepted zeroed and stored past the context's
end; zeros as the first drafts of a request; the last slot for requests that only pad a batch. A prompt that outgrows
the context, and a request that was prefilled on another machine, generate from an empty slot (8d62b3e5). 864a4300 also
passes `ctx_rows_start` to drafters that take it, and a mask row of the drafter's own; 8d62b3e5 asks `fc` itself for the
dtype of the cache, and for LiLiCorr before DFlash2's selector. The cache manager's pool of pages (414ba69f42c2 and
8d62b3e5) has two layouts: V1 slices a layer out of each page, V2 is a view of every layer over the whole pool, in which
a page's entry is its slot times the layers. Entries that are not allocated become 0, another request's page.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.target import Segment, Target


class Worker:
    """The drafter's half of a step: context rows in, K drafts for each request out."""

    BACKEND = "VANILLA"

    def __init__(
        self, drafter: Any, *, max_batch: int, max_ctx: int, num_drafts: int, generation: str = "414ba69f"
    ) -> None:
        self.drafter = drafter
        self.generation = generation
        weight: torch.dtype = drafter.fc.weight.dtype
        self.dtype = getattr(drafter.fc, "dtype", weight) if generation == "8d62b3e5" else weight
        self.K = num_drafts
        self.max_ctx = max_ctx
        self.dummy_slot = max_batch
        assert drafter.dflash_attention_backend == self.BACKEND
        assert num_drafts + 1 <= drafter.block_size
        self.peak_bytes = 0
        """Largest size of the caches that were alive at one time."""
        self._caches: list[weakref.ref[Tensor]] = []
        self.allocate(max_batch)

    def allocate(self, max_batch: int) -> None:
        """A cache with a slot more than requests; TensorRT-LLM replaces it once, after it has sized its own cache.

        It holds the old K until the new one is there, and the old V until the new V is (00679c66c3e3).
        """
        drafter = self.drafter
        drafter._build_fused_kv_buffers()
        shape = (
            max_batch + 1, drafter._num_attn_layers, self.max_ctx + self.K + 1, drafter._num_kv_heads,
            drafter._head_dim,
        )  # fmt: skip
        self.k_cache = self._zeros(shape)
        self.v_cache = self._zeros(shape)
        self.ctx_len = torch.zeros(max_batch + 1, dtype=torch.long)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        made = torch.zeros(shape, dtype=self.dtype)
        self._caches.append(weakref.ref(made))
        self.peak_bytes = max(self.peak_bytes, self.cache_bytes())
        return made

    def cache_bytes(self) -> int:
        """Size of all caches that are alive."""
        return sum(cache.nbytes for reference in self._caches if (cache := reference()) is not None)

    def prefill(self, slot: int, taps: Tensor) -> bool:
        """Appends the rows of a chunk of a prompt; False where they do not fit, and the slot is empty now."""
        begin = int(self.ctx_len[slot])
        end = begin + len(taps)
        if end > self.max_ctx:
            self.release(slot)
            return False
        projected = self.drafter.project_target_hidden(taps).to(self.dtype)
        k, v = self.drafter.precompute_context_kv(projected, torch.arange(begin, end))
        self._store(torch.full((len(taps),), slot), torch.arange(begin, end), k, v)
        self.ctx_len[slot] = end
        return True

    def _limits(self) -> tuple[int, int]:
        """The last column that rows are stored in, and the most rows of a context."""
        return self.max_ctx - 1, self.max_ctx

    def _store(self, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        self.k_cache[slots, :, positions] = k
        self.v_cache[slots, :, positions] = v

    def _context(self, slots: Tensor) -> dict[str, Any]:
        return {
            "ctx_k_cache": self.k_cache, "ctx_v_cache": self.v_cache, "ctx_cache_batch_idx": slots,
            "ctx_kv_cache": None, "ctx_page_table": None,
        }  # fmt: skip

    def share(self, slot: int, source: int, num_tokens: int) -> None:
        """A prefix of another request's rows."""
        for cache in (self.k_cache, self.v_cache):
            cache[slot, :, :num_tokens] = cache[source, :, :num_tokens]
        self.ctx_len[slot] = num_tokens

    def release(self, slot: int) -> None:
        """A request ended; the rows it left are there when the next one gets its slot."""
        self.ctx_len[slot] = 0

    def warm_up(self, slots: Tensor, taps: Tensor) -> None:
        """A step before a CUDA graph is captured: what it wrote stays, the lengths are rolled back."""
        saved = self.ctx_len.clone()
        ones = torch.ones(len(slots), dtype=torch.long)
        self.step(slots, taps, ones, ones)
        self.ctx_len.copy_(saved)

    def step(self, slots: Tensor, taps: Tensor, num_accepted: Tensor, bonus: Tensor) -> Tensor:
        """Drafts [B, K] after taps [B * (K + 1), A*H], of which `num_accepted` [B] rows count, and `bonus` [B]."""
        drafter, steps = self.drafter, torch.arange(self.K + 1)
        before = self.ctx_len[slots]
        positions = (before[:, None] + steps).reshape(-1)
        projected = drafter.project_target_hidden(taps).to(self.dtype)
        k, v = drafter.precompute_context_kv(projected, positions)
        keep = (steps < num_accepted[:, None]).view(-1, 1, 1, 1).to(k.dtype)
        k.mul_(keep)
        v.mul_(keep)
        rows = slots[:, None].expand(-1, self.K + 1).reshape(-1)
        last_column, most_rows = self._limits()
        self._store(rows, positions.clamp(max=last_column), k, v)
        self.ctx_len[slots] += num_accepted
        self.ctx_len.clamp_(max=most_rows)
        embed = drafter.draft_model_full.model.embed_tokens
        embedded = embed(torch.cat([bonus, torch.tensor([drafter.mask_token_id])]))
        mask = getattr(drafter, "mask_token_embedding", None) if self.generation == "864a4300" else None
        noise = (embedded[-1] if mask is None else mask).expand(len(slots), self.K + 1, -1).clone()
        noise[:, 0] = embedded[:-1]
        hidden = drafter.dflash_forward(
            noise_embedding=noise,
            query_positions=(before + num_accepted).clamp(max=self.max_ctx)[:, None] + steps,
            num_ctx_per_req=self.ctx_len[slots], **self._context(slots), **self._rows_start(),
        )  # fmt: skip
        first = torch.arange(len(slots)) * (self.K + 1)
        drafted = hidden[(first[:, None] + 1 + torch.arange(self.K)).flatten()]
        logits = drafter.logits_processor(drafted, drafter.lm_head, None, True).reshape(len(slots), self.K, -1)
        if self.generation == "8d62b3e5" and getattr(drafter, "lilicorr", None) is not None:  # _apply_lilicorr
            log_probs, candidate_ids = logits.log_softmax(-1).topk(drafter.lilicorr.candidate_topk, dim=-1)
            hidden_rows = drafted.reshape(len(slots), self.K, -1)
            last = projected.view(len(slots), self.K + 1, -1)[torch.arange(len(slots)), num_accepted - 1]
            scores = drafter.select_lilicorr_path(candidate_ids, log_probs, hidden_rows, last)
            assert scores.shape == candidate_ids.shape
            return candidate_ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
        if getattr(drafter, "has_candidate_selector", False):  # _apply_dflash2_selector, on one rank
            assert getattr(drafter.model, "d2t", None) is None
            selector = drafter.candidate_selector
            assert logits.shape[-1] == selector.predecessor_codebook.shape[0]
            unary, candidate_ids = torch.topk(logits, selector.top_k, dim=-1)
            hidden_rows = drafted.reshape(len(slots), self.K, -1)
            logits = drafter.select_candidate_path(logits, candidate_ids, unary, hidden_rows, bonus)
            assert ((logits > -torch.inf).sum(dim=-1) == selector.top_k).all()
        drafts: Tensor = logits.argmax(dim=-1)
        return drafts

    def _rows_start(self) -> dict[str, Any]:
        """dflash_ctx_rows_kwargs: a dense arena has no rows before the batch's generations."""
        is_taken = "ctx_rows_start" in inspect.signature(self.drafter.dflash_forward).parameters
        return {"ctx_rows_start": None} if is_taken and self.generation == "864a4300" else {}


class PooledWorker(Worker):
    """Rows of the table are the batch's, prompts first; requests keep their pages wherever in it they stand."""

    BACKEND = "TRTLLM"
    pool: Tensor
    table: Tensor

    def __init__(self, drafter: Any, *, version: str, tokens_per_block: int, seed: int = 0, **sizes: int) -> None:
        self._version = version
        self._size = tokens_per_block
        self._random = torch.Generator().manual_seed(seed)
        self._start = 0
        super().__init__(drafter, **sizes)

    def allocate(self, max_batch: int) -> None:
        """A pool, its views, and the table that every batch is written into; pages are NaN until they are written.

        The one before stays, so that this one lies elsewhere and who reads there gets NaN; so does who reads with the
        strides of V1 beyond the end.
        """
        drafter = self.drafter
        if "pool" in vars(self):
            self._replaced = self.pool.fill_(torch.nan), self.table
        drafter._build_fused_kv_buffers()
        L, G, D = drafter._num_attn_layers, drafter._num_kv_heads, drafter._head_dim
        blocks = -(-(self.max_ctx + self.K + 1) // self._size)
        num_pages = (max_batch + 1) * blocks + 3
        dtype = drafter.fc.weight.dtype
        self.pool = torch.full((num_pages * (L + 1), L, 2, G, self._size, D), torch.nan, dtype=dtype)[:num_pages]
        self.views = [self.pool[:, layer] for layer in range(L)]
        if self._version == "V2":
            part = self.pool[0, 0].numel()
            flat, whole = self.pool.flatten(), num_pages * L
            sizes, strides = self.pool.shape[2:], (part, *self.pool.stride()[2:])
            self.views = [flat.as_strided((whole - layer, *sizes), strides, layer * part) for layer in range(L)]
        self.table = torch.zeros(max_batch + 1, blocks, dtype=torch.int32)
        self._free = torch.randperm(num_pages, generator=self._random).tolist()
        self._pages: dict[int, list[int]] = {slot: [] for slot in range(max_batch + 1)}
        self.ctx_len = torch.zeros(max_batch + 1, dtype=torch.long)

    def cache_bytes(self) -> int:
        return self.pool.nbytes

    def share(self, slot: int, source: int, num_tokens: int) -> None:
        """A prefix hit: whole pages of another request, whose rows stand where this one's would."""
        assert num_tokens % self._size == 0
        self._pages[slot] = self._pages[source][: num_tokens // self._size]
        self.ctx_len[slot] = num_tokens

    def release(self, slot: int) -> None:
        """Unshared pages are returned; their contents stay until they are written again."""
        super().release(slot)
        given, self._pages[slot] = self._pages[slot], []
        held = {page for pages in self._pages.values() for page in pages}
        self._free += [page for page in given if page not in held]

    def _store(self, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        for slot, position, *row in zip(slots.tolist(), positions.tolist(), k, v, strict=True):
            pages = self._pages[slot]
            while len(pages) <= position // self._size:
                pages.append(self._free.pop())
            for kv, values in enumerate(row):  # [L, G, D]
                self.pool[pages[position // self._size], :, kv, :, position % self._size] = values

    def _limits(self) -> tuple[int, int]:
        rows = self.table.shape[1] * self._size
        return rows - 1, min(self.max_ctx, rows - self.drafter.block_size)

    def _context(self, slots: Tensor) -> dict[str, Any]:
        self.table.zero_()
        self._start = int(torch.randint(len(self.table) - len(slots) + 1, (), generator=self._random))  # prompts
        for row, slot in enumerate(slots.tolist(), self._start):
            entries = torch.tensor(self._pages[slot], dtype=torch.int32)
            self.table[row, : len(entries)] = entries * (len(self.views) if self._version == "V2" else 1)
        return {
            "ctx_k_cache": None, "ctx_v_cache": None, "ctx_cache_batch_idx": self._start + torch.arange(len(slots)),
            "ctx_kv_cache": self.views, "ctx_page_table": self.table,
        }  # fmt: skip

    def _rows_start(self) -> dict[str, Any]:
        return dict.fromkeys(super()._rows_start(), self._start)


class LmHead(nn.Module):
    """The target's lm_head and embedding, as modules that a drafter can share."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self._call(value)
        return result


def share(drafter: Any, target: Any) -> None:
    """Steps of TensorRT-LLM's loader, weight mapper and target model with the drafter before the first step."""
    drafter.logits_processor = lambda hidden, lm_head, *_: lm_head(hidden)
    # base_weight_mapper.py at 0c8de69a1ca6, init_model_and_config
    assert hasattr(drafter, "model_config")
    assert hasattr(drafter, "config")
    # modeling_speculative.py, load_draft_weights
    is_mapped = "weight_mapper" in inspect.getfullargspec(drafter.load_weights).args
    drafter.load_weights(weights={}, **({"weight_mapper": None} if is_mapped else {}))
    shared = SimpleNamespace(embed_tokens=LmHead(target.embed))
    drafter.load_weights_from_target_model(SimpleNamespace(model=shared, lm_head=LmHead(target.logits)))


def engine_of(session: Session) -> Path:
    executor: Any = session.drafter.executor
    return Path(executor._directory)


def draft_config(spec: Any) -> SimpleNamespace:
    """The part of TensorRT-LLM's ModelConfig that the drafter keeps."""
    return SimpleNamespace(pretrained_config=SimpleNamespace(max_position_embeddings=spec.max_position_embeddings))


def model_config(engine: Path, *, attention_backend: str = "VANILLA", **mapping: Any) -> SimpleNamespace:
    """The part of the target's ModelConfig that the builder of drafters reads, on one pipeline stage."""
    spec_config = SimpleNamespace(attention_backend=attention_backend, speculative_model=str(engine))
    return SimpleNamespace(spec_config=spec_config, mapping=SimpleNamespace(**{"pp_size": 1, **mapping}))


@dataclass
class Trace:
    """Results of a request."""

    token_ids: list[int]
    drafts: list[list[int]] = field(default_factory=list)
    expected_drafts: list[list[int]] = field(default_factory=list)
    """By our own drafter, in the same state."""
    accepted: int = 0


class Decoding:
    """Requests on slots of the mimicked worker, which come, are prefilled in chunks, step together and go."""

    def __init__(self, worker: Worker, target: Target, drafter: Drafter) -> None:
        self.worker = worker
        self._target = target
        self._drafter = drafter
        self.traces: dict[int, Trace] = {}
        self._drafts: dict[int, list[int]] = {}
        self._prompts: dict[int, list[int]] = {}

    @torch.inference_mode()
    def prefill(
        self, slot: int, part: list[int], shared_with: int | None = None, *, is_elsewhere: bool = False
    ) -> None:
        """A chunk of the prompt of the request on `slot`; after the last one, it may step.

        The worker need not store the first, where it is that of another slot. With `is_elsewhere` another machine
        computed it, and no drafter here sees it.
        """
        verified = self._target.verify([Segment(slot=slot, token_ids=part, num_logits=1)], with_taps=True)
        self._target.rollback(slot, 0)
        is_there = not is_elsewhere
        if shared_with is not None:
            self.worker.share(slot, shared_with, len(part))
        elif is_there and not self.worker.prefill(slot, verified.taps):
            self._drafter.release(slot)
            is_there = False
        if is_there:
            self._drafter.inject([slot], [len(part)], verified.taps)
        self._prompts[slot] = self._prompts.get(slot, []) + part
        self.traces[slot] = Trace([int(verified.logits[-1].argmax())])
        self._drafts[slot] = [0] * self.worker.K  # TensorRT-LLM's placeholders

    @torch.inference_mode()
    def step(self, slots: Sequence[int]) -> None:
        """One step of the requests on `slots`, and of one that only pads the batch: graphs have fixed batch sizes."""
        width = self.worker.K + 1
        traces = [self.traces[slot] for slot in slots]
        drafts = torch.tensor([self._drafts[slot] for slot in slots])
        tokens = [[trace.token_ids[-1], *row] for trace, row in zip(traces, drafts.tolist(), strict=True)]
        segments = [
            Segment(slot=slot, token_ids=ids, num_logits=width) for slot, ids in zip(slots, tokens, strict=True)
        ]
        verified = self._target.verify(segments, with_taps=True)
        answers = verified.logits.argmax(dim=-1).view(len(slots), width)
        matches = (answers[:, :-1] == drafts).cumprod(dim=1).sum(dim=1)
        rows = zip(slots, traces, answers.tolist(), matches.tolist(), strict=True)
        for index, (slot, trace, row, matched) in enumerate(rows):
            trace.token_ids += row[: matched + 1]
            trace.accepted += matched
            self._target.rollback(slot, width - 1 - matched)
            begin = index * width
            self._drafter.inject([slot], [matched + 1], verified.taps[begin : begin + matched + 1])
        bonus = torch.tensor([trace.token_ids[-1] for trace in traces])
        one = torch.ones(1, dtype=torch.long)
        padded = torch.tensor([*slots, self.worker.dummy_slot])
        taps = torch.cat([verified.taps, verified.taps[:width]])
        found = self.worker.step(padded, taps, torch.cat([matches + 1, one]), torch.cat([bonus, one]))[:-1]
        expected = _own_drafts(self._drafter, self._target, list(slots), bonus)[:, : self.worker.K]
        for slot, trace, ours, theirs in zip(slots, traces, found.tolist(), expected.tolist(), strict=True):
            trace.drafts.append(ours)
            trace.expected_drafts.append(theirs)
            self._drafts[slot] = ours

    def evict(self, slot: int) -> None:
        """The request on `slot` loses its pages, and its prompt and answer are read again as one prompt."""
        trace, prompt = self.traces[slot], self._prompts[slot]
        self.release(slot)
        self.prefill(slot, prompt + trace.token_ids[:-1])
        assert self.traces[slot].token_ids == trace.token_ids[-1:]
        self._prompts[slot], self.traces[slot] = prompt, trace

    def release(self, slot: int) -> None:
        """The request on `slot` ends."""
        del self._prompts[slot]
        self.worker.release(slot)
        self._target.release(slot)
        self._drafter.release(slot)


def decode(
    worker: Worker, target: Target, drafter: Drafter, prompts: Sequence[list[int]], num_steps: int, *, chunk: int = 40
) -> list[Trace]:
    """`num_steps` steps of all prompts at once, one slot each, after prefills of `chunk` tokens."""
    decoding = Decoding(worker, target, drafter)
    slots = range(len(prompts))
    for slot, prompt in zip(slots, prompts, strict=True):
        for begin in range(0, len(prompt), chunk):
            decoding.prefill(slot, prompt[begin : begin + chunk])
    for _ in range(num_steps):
        decoding.step(slots)
    for slot in slots:
        decoding.release(slot)
    return list(decoding.traces.values())


def _own_drafts(drafter: Drafter, target: Target, slots: list[int], anchors: Tensor) -> Tensor:
    drafter.borrow(target)
    proposals = drafter.propose(slots, anchors.tolist(), drafter.spec.num_draft_tokens)
    return torch.tensor([proposal.token_ids for proposal in proposals])
