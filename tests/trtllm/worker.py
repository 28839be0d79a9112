# SPDX-License-Identifier: Apache-2.0
"""Calls a drafter as TensorRT-LLM's DFlash worker does, in its order and with its cache, on the CPU.

Written from NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/speculative/dflash.py at 414ba69f42c2, attention backend VANILLA:
K + 1 rows of taps for every request in every step, those that were not accepted zeroed and stored past the context's
end; zeros as the first drafts of a request; the last slot for requests that only pad a batch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Worker:
    """The drafter's half of a step: context rows in, K drafts for each request out."""

    def __init__(self, drafter: Any, *, max_batch: int, max_ctx: int, num_drafts: int) -> None:
        self.drafter = drafter
        self.K = num_drafts
        self.max_ctx = max_ctx
        self.dummy_slot = max_batch
        assert drafter.dflash_attention_backend == "VANILLA"
        assert num_drafts + 1 <= drafter.block_size
        drafter._build_fused_kv_buffers()
        self.allocate(max_batch)

    def allocate(self, max_batch: int) -> None:
        """A cache with a slot more than requests; TensorRT-LLM replaces it once, after it has sized its own cache."""
        drafter = self.drafter
        shape = (
            max_batch + 1, drafter._num_attn_layers, self.max_ctx + self.K + 1, drafter._num_kv_heads,
            drafter._head_dim,
        )  # fmt: skip
        self.k_cache = torch.zeros(shape, dtype=drafter.fc.weight.dtype)
        self.v_cache = torch.zeros_like(self.k_cache)
        self.ctx_len = torch.zeros(max_batch + 1, dtype=torch.long)

    def prefill(self, slot: int, taps: Tensor) -> None:
        """Appends the rows of a chunk of a prompt."""
        begin = int(self.ctx_len[slot])
        end = begin + len(taps)
        projected = self.drafter.project_target_hidden(taps).to(self.k_cache.dtype)
        k, v = self.drafter.precompute_context_kv(projected, torch.arange(begin, end))
        self.k_cache[slot, :, begin:end] = k.permute(1, 0, 2, 3)
        self.v_cache[slot, :, begin:end] = v.permute(1, 0, 2, 3)
        self.ctx_len[slot] = end

    def step(self, slots: Tensor, taps: Tensor, num_accepted: Tensor, bonus: Tensor) -> Tensor:
        """Drafts [B, K] after taps [B * (K + 1), A*H], of which `num_accepted` [B] rows count, and `bonus` [B]."""
        drafter, steps = self.drafter, torch.arange(self.K + 1)
        before = self.ctx_len[slots]
        positions = (before[:, None] + steps).reshape(-1)
        projected = drafter.project_target_hidden(taps).to(self.k_cache.dtype)
        k, v = drafter.precompute_context_kv(projected, positions)
        keep = (steps < num_accepted[:, None]).view(-1, 1, 1, 1).to(k.dtype)
        k.mul_(keep)
        v.mul_(keep)
        rows = slots[:, None].expand(-1, self.K + 1).reshape(-1)
        columns = positions.clamp(max=self.max_ctx - 1)
        self.k_cache[rows, :, columns] = k
        self.v_cache[rows, :, columns] = v
        self.ctx_len[slots] += num_accepted
        self.ctx_len.clamp_(max=self.max_ctx)
        embed = drafter.draft_model_full.model.embed_tokens
        embedded = embed(torch.cat([bonus, torch.tensor([drafter.mask_token_id])]))
        noise = embedded[-1].expand(len(slots), self.K + 1, -1).clone()
        noise[:, 0] = embedded[:-1]
        hidden = drafter.dflash_forward(
            noise_embedding=noise,
            query_positions=(before + num_accepted)[:, None] + steps,
            num_ctx_per_req=self.ctx_len[slots],
            ctx_k_cache=self.k_cache,
            ctx_v_cache=self.v_cache,
            ctx_cache_batch_idx=slots,
            ctx_kv_cache=None,
            ctx_page_table=None,
        )
        first = torch.arange(len(slots)) * (self.K + 1)
        drafted = hidden[(first[:, None] + 1 + torch.arange(self.K)).flatten()]
        logits = drafter.logits_processor(drafted, drafter.lm_head, None, True)
        drafts: Tensor = logits.reshape(len(slots), self.K, -1).argmax(dim=-1)
        return drafts


class LmHead(nn.Module):
    """The target's lm_head and embedding, as modules that a drafter can share."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self._call(value)
        return result


def share(drafter: Any, target: Any) -> None:
    """What TensorRT-LLM's target model does with the drafter before the first step."""
    drafter.logits_processor = lambda hidden, lm_head, *_: lm_head(hidden)
    drafter.load_weights(weights={}, weight_mapper=None)
    shared = SimpleNamespace(embed_tokens=LmHead(target.embed))
    drafter.load_weights_from_target_model(SimpleNamespace(model=shared, lm_head=LmHead(target.logits)))


def draft_config(spec: Any) -> SimpleNamespace:
    """What the drafter keeps of TensorRT-LLM's ModelConfig."""
    return SimpleNamespace(pretrained_config=SimpleNamespace(max_position_embeddings=spec.max_position_embeddings))
