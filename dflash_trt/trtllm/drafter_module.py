# SPDX-License-Identifier: Apache-2.0
"""The drafter module that TensorRT-LLM's DFlash worker calls, with an engine directory's graphs in place of layers.

Attributes and methods have the worker's names (tests/contract/generations.json), not ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.executor import DraftInputs, Executor
from dflash_trt.errors import EngineError
from dflash_trt.trtllm.worker_context import BoundContext

POOL_BACKEND = "TRTLLM"  # the attention_backend with which the worker binds the pool
DENSE_BACKEND = "VANILLA"
# With AUTO, where a release has it, the worker takes the drafter's own choice.
BACKENDS = {DENSE_BACKEND: False, POOL_BACKEND: True, "AUTO": True}


class _Backbone(nn.Module):
    """Modules that the target shares; the layers are in the graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens: nn.Module | None = None
        self.layers = nn.ModuleList()
        self.norm = nn.Identity()


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = _Backbone()
        self.lm_head: nn.Module | None = None


class EngineDrafter(nn.Module):
    """Computes context rows and blocks with `executor`; the worker owns the context cache, dense or a pool of pages."""

    def __init__(self, draft_config: Any, spec: DraftSpec, executor: Executor, *, in_pool: bool = False) -> None:
        """`draft_config` is TensorRT-LLM's ModelConfig of the engine directory. Nothing is loaded yet."""
        super().__init__()
        self._executor = executor
        self.model_config = draft_config
        self.config = draft_config.pretrained_config
        self.draft_model_full = _Shared()
        self.model = self.draft_model_full.model
        self.lm_head: nn.Module | None = None
        self.logits_processor: Any = None  # the target model sets it
        self.mask_token_id = spec.mask_token_id
        self.target_layer_ids = list(spec.target_layer_ids)
        self.mask_token_embedding: Tensor | None = None  # a mask row of the draft's own; ours use the target's
        self.block_size = spec.block_size
        self.dflash_attention_backend = POOL_BACKEND if in_pool else DENSE_BACKEND
        # A pool without the worker's own attention, and so without its demands on GPUs and masks.
        self._paged_ctx_cache = in_pool
        self._uses_worker_attention_backend = False
        self._kv_factor = 2
        self._context = BoundContext(executor, spec)
        self.has_drafted = False  # read by registration.py, which proves that this drafter is called
        # The worker asks whether these two exist, and what dtype the cache should have; the context graph holds both.
        self.fc = nn.Linear(1, 1, bias=False, dtype=executor.cache_dtype)
        self.hidden_norm = nn.Identity()
        # This rank's share; everything unless ranks share the drafter.
        self._num_attn_layers = len(spec.layers)
        self._num_heads = spec.num_attention_heads
        self._num_kv_heads = spec.num_key_value_heads
        self._head_dim = spec.head_dim

    def load_weights(self, weights: Any, weight_mapper: Any = None, **_: Any) -> None:
        """Loads the executor; what TensorRT-LLM read from the directory's safetensors is not needed."""
        self._executor.load()

    def load_weights_from_target_model(self, target_model: Any) -> None:
        """Takes embedding and lm_head from the target."""
        self.model.embed_tokens = target_model.model.embed_tokens
        self.draft_model_full.lm_head = target_model.lm_head
        self.lm_head = target_model.lm_head

    def _build_fused_kv_buffers(self) -> None:
        """Release the old cache: the worker calls this just before it allocates or replaces its cache.

        With dummy weights this is also the first call.
        """
        self._executor.release()
        self._context.forget()
        self._executor.load()

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        """Return the taps unchanged: fc and hidden_norm are part of the context graph."""
        return hidden_states

    def precompute_context_kv(self, projected_hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, L, G, D] of taps [T, A*H] at positions [T]; the worker multiplies them in place and stores them."""
        k, v = self._executor.context(projected_hidden, positions)["kv"].unbind(1)
        return k.clone(), v.clone()  # the worker may keep them for longer than until the next call

    def dflash_forward(
        self,
        noise_embedding: Tensor,
        query_positions: Tensor,
        num_ctx_per_req: Tensor,
        ctx_k_cache: Tensor | None,
        ctx_v_cache: Tensor | None,
        ctx_cache_batch_idx: Tensor,
        ctx_kv_cache: Any = None,
        ctx_page_table: Tensor | None = None,
        ctx_rows_start: int | None = None,
    ) -> Tensor:
        """hidden [B*W, H] of blocks noise_embedding [B, W, H] over the context, which is only read.

        The context is in caches [slots, L, C, G, D], or in a pool's views [pages, 2, G, rows, D] by layer with a page
        table whose rows `ctx_cache_batch_idx` names. Raises EngineError for a context of another draft.
        """
        if ctx_page_table is not None:
            self._context.bind_pool(ctx_kv_cache, ctx_page_table)
            page_ids = ctx_page_table[ctx_cache_batch_idx]
        elif ctx_k_cache is not None and ctx_v_cache is not None:
            self._context.bind_caches(ctx_k_cache, ctx_v_cache)
            page_ids = ctx_cache_batch_idx[:, None]
        else:
            raise EngineError("engine mode: expected a context cache, dense or paged, found none")
        B, W, H = noise_embedding.shape
        # The drafter was trained with all S positions; the worker may leave mask tokens out that it does not verify.
        masks = noise_embedding[:, 1:2].expand(B, self.block_size - W, H)
        blocks = torch.cat([noise_embedding, masks], dim=1)
        offsets = torch.arange(self.block_size, dtype=query_positions.dtype, device=query_positions.device)
        positions = query_positions[:, :1] + offsets
        hidden = self._executor.draft(DraftInputs(blocks, positions, page_ids, num_ctx_per_req))["hidden"]
        self.has_drafted = True
        return hidden[:, :W].to(noise_embedding.dtype, copy=True).view(B * W, H)  # the next call overwrites `hidden`
