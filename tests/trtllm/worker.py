# SPDX-License-Identifier: Apache-2.0
"""Calls a drafter as TensorRT-LLM's DFlash worker does, in its order and with its cache, on the CPU.

Written from NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/speculative/dflash.py at 414ba69f42c2, attention backend VANILLA:
K + 1 rows of taps for every request in every step, those that were not accepted zeroed and stored past the context's
end; zeros as the first drafts of a request; the last slot for requests that only pad a batch. 864a4300 also passes
`ctx_rows_start` to drafters that take it, and a mask row of the drafter's own; 8d62b3e5 asks `fc` itself for the dtype
of the cache, and for LiLiCorr before DFlash2's selector.
"""

from __future__ import annotations

import inspect
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


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

    def prefill(self, slot: int, taps: Tensor) -> None:
        """Appends the rows of a chunk of a prompt."""
        begin = int(self.ctx_len[slot])
        end = begin + len(taps)
        projected = self.drafter.project_target_hidden(taps).to(self.dtype)
        k, v = self.drafter.precompute_context_kv(projected, torch.arange(begin, end))
        self._store(torch.full((len(taps),), slot), torch.arange(begin, end), k, v)
        self.ctx_len[slot] = end

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
        columns = positions.clamp(max=self.max_ctx - 1)
        self._store(rows, columns, k, v)
        self.ctx_len[slots] += num_accepted
        self.ctx_len.clamp_(max=self.max_ctx)
        embed = drafter.draft_model_full.model.embed_tokens
        embedded = embed(torch.cat([bonus, torch.tensor([drafter.mask_token_id])]))
        mask = getattr(drafter, "mask_token_embedding", None) if self.generation == "864a4300" else None
        noise = (embedded[-1] if mask is None else mask).expand(len(slots), self.K + 1, -1).clone()
        noise[:, 0] = embedded[:-1]
        hidden = drafter.dflash_forward(
            noise_embedding=noise,
            query_positions=(before + num_accepted)[:, None] + steps,
            num_ctx_per_req=self.ctx_len[slots],
            **self._context(slots),
            **self._rows_start(),
        )
        first = torch.arange(len(slots)) * (self.K + 1)
        drafted = hidden[(first[:, None] + 1 + torch.arange(self.K)).flatten()]
        logits = drafter.logits_processor(drafted, drafter.lm_head, None, True).reshape(len(slots), self.K, -1)
        assert self.generation != "8d62b3e5" or getattr(drafter, "lilicorr", None) is None, "it would select the path"
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


class LmHead(nn.Module):
    """The target's lm_head and embedding, as modules that a drafter can share."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self._call(value)
        return result


def share(drafter: Any, target: Any) -> None:
    """What TensorRT-LLM's loader, weight mapper and target model do with the drafter before the first step."""
    drafter.logits_processor = lambda hidden, lm_head, *_: lm_head(hidden)
    # base_weight_mapper.py at 0c8de69a1ca6, init_model_and_config
    assert hasattr(drafter, "model_config")
    assert hasattr(drafter, "config")
    # modeling_speculative.py, load_draft_weights
    is_mapped = "weight_mapper" in inspect.getfullargspec(drafter.load_weights).args
    drafter.load_weights(weights={}, **({"weight_mapper": None} if is_mapped else {}))
    shared = SimpleNamespace(embed_tokens=LmHead(target.embed))
    drafter.load_weights_from_target_model(SimpleNamespace(model=shared, lm_head=LmHead(target.logits)))


def draft_config(spec: Any) -> SimpleNamespace:
    """What the drafter keeps of TensorRT-LLM's ModelConfig."""
    return SimpleNamespace(pretrained_config=SimpleNamespace(max_position_embeddings=spec.max_position_embeddings))
