# SPDX-License-Identifier: Apache-2.0
"""The drafter module that TensorRT-LLM's DFlash worker calls, with an engine directory's graphs in place of layers.

Attributes and methods have the worker's names (tests/contract/generations.json), not ours.

A DFlash2 draft's module also chooses the path through a block's candidates, as TensorRT-LLM's own DFlash2 drafter
does (pull request 18155 with its `test_dflash2_semantics.py`).

The context in the managed pool was read in NVIDIA/TensorRT-LLM: _torch/speculative/dflash.py at 414ba69f, 864a4300 and
8d62b3e5, and _torch/pyexecutor/_util.py at 12a71fe4 (`_create_one_model_draft_kv_cache_manager`). None of it was run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.candidate_selector import CandidateSelector
from dflash_trt.engine.executor import DraftInputs, Executor
from dflash_trt.engine.signatures import PAGE_SIZES
from dflash_trt.errors import EngineError

LOG = logging.getLogger(__name__)
POOL_BACKEND = "TRTLLM"  # of attention_backend: with it the worker binds the pool
DENSE_BACKEND = "VANILLA"
# With AUTO, where a release has it, the worker takes the drafter's own choice.
BACKENDS = {DENSE_BACKEND: False, POOL_BACKEND: True, "AUTO": True}


def declare_pool(draft_config: Any, spec: DraftSpec) -> None:
    """Make TensorRT-LLM's ModelConfig of the draft describe the rows that every rank keeps.

    The manager divides KV heads among the ranks, and `spec` has those of one: all, or its share. One pool holds all
    layers only if no layer has a window: windows are in the plans.
    """
    config, mapping = draft_config.pretrained_config, draft_config.mapping
    ranks = 1 if mapping.enable_attention_dp else mapping.tp_size
    config.num_key_value_heads = spec.num_key_value_heads * ranks
    config.use_sliding_window = False
    config.sliding_window = None
    config.layer_types = ["full_attention"] * spec.num_layers


class BoundContext:
    """Binds the executor to the worker's context; its manager is replaced once, after it has sized its memory.

    Wrong addresses, shapes and strides are refused by name. Wrong contents of the pool or the table (a page of another
    request, a length beyond what was written) are not: reading them back would stall every step. Drafts are then worse,
    and the target's tokens unchanged.
    """

    def __init__(self, executor: Executor, spec: DraftSpec) -> None:
        self._executor = executor
        self._layers, self._heads, self._head_dim = len(spec.layers), spec.num_key_value_heads, spec.head_dim
        self._key: tuple[object, ...] | None = None

    def forget(self) -> None:
        """The worker is about to replace its context."""
        self._key = None

    def bind_caches(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Bind dense caches [slots, L, C, G, D] before every pass; EngineError for those of another draft."""
        key = _addresses(k_cache, v_cache)
        if key == self._key:
            return
        for cache in (k_cache, v_cache):
            self._expect("a context cache", (cache.shape[1], *cache.shape[3:]), cache.dtype)
        if (k_cache.shape, k_cache.stride()) != (v_cache.shape, v_cache.stride()):
            raise EngineError(
                "engine mode: expected K and V of the same shape and strides, found"
                f" {tuple(k_cache.shape)}, {k_cache.stride()} and {tuple(v_cache.shape)}, {v_cache.stride()}"
            )
        self._executor.bind(k_cache, v_cache)
        self._key = key

    def bind_pool(self, layers: Sequence[Tensor], page_table: Tensor) -> None:
        """Bind views [pages, 2, G, rows, D] of all layers and the worker's table [slots, M] INT32 before every pass.

        Raises EngineError for a pool of another draft, or of an unknown layout.
        """
        key = _addresses(*layers, page_table)
        if key == self._key:
            return
        for layer in layers:
            found = (len(layers), layer.shape[2], layer.shape[4])
            self._expect("a pool", found, layer.dtype)
        self._check_pages(layers)
        if page_table.dtype != torch.int32 or not page_table.is_contiguous():
            raise EngineError(f"engine mode: expected a contiguous page table in torch.int32, found {page_table.dtype}")
        if isinstance(layers, Tensor):
            LOG.warning(
                "engine mode: the worker set aside a private context arena in the place of the managed pool;"
                " its log says why"
            )
        self._executor.bind_pool(list(layers), page_table.shape[1])
        self._key = key

    def _expect(self, what: str, found: tuple[int, ...], dtype: torch.dtype) -> None:
        expected = (self._layers, self._heads, self._head_dim)
        if found != expected or dtype != self._executor.cache_dtype:
            raise EngineError(
                f"engine mode: expected {what} of layers, heads and head_dim {expected} in"
                f" {self._executor.cache_dtype}, found {found} in {dtype}"
            )

    def _check_pages(self, layers: Sequence[Tensor]) -> None:
        """A layer's page is K [G, rows, D], then V; pages are contiguous (V2) or interleaved by layer (V1)."""
        rows, first = layers[0].shape[3], min(layer.data_ptr() for layer in layers)
        if rows not in PAGE_SIZES:
            raise EngineError(
                f"engine mode: expected pages of 16, 32 or 64 tokens, found {rows}",
                hint="set kv_cache_config.tokens_per_block to 32",
            )
        page = 2 * self._heads * rows * self._head_dim
        inner = (page // 2, rows * self._head_dim, self._head_dim, 1)
        expected = {"V2": (page, *inner), "V1": (self._layers * page, *inner)}
        offsets = [layer.data_ptr() - first for layer in layers]
        for index, layer in enumerate(layers):
            if layer.shape[3] != rows or layer.stride() not in expected.values():
                raise EngineError(
                    f"engine mode: expected a pool whose pages of {rows} tokens have the strides"
                    f" {' or '.join(f'{strides} ({name})' for name, strides in expected.items())}, found"
                    f" {layer.stride()} with {layer.shape[3]} tokens in layer {index}"
                )
            if layer.stride() != layers[0].stride():
                raise EngineError("engine mode: expected a pool whose layers have the same strides, found others")
        if len(set(offsets)) < self._layers or any(offset % (page * layers[0].itemsize) for offset in offsets):
            raise EngineError(
                f"engine mode: expected layers whole pages of {page * layers[0].itemsize} bytes apart, found them"
                f" {offsets} bytes behind the first"
            )


def _addresses(*tensors: Tensor) -> tuple[object, ...]:
    return tuple((tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in tensors)


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
        k, v = self._executor.context(projected_hidden, positions).unbind(1)
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
        hidden = self._executor.draft(DraftInputs(blocks, positions, page_ids, num_ctx_per_req))
        self.has_drafted = True
        return hidden[:, :W].reshape(B * W, H)


class DFlash2EngineDrafter(EngineDrafter):
    """Proposes a path; the worker finds the candidates with the target's lm_head."""

    is_dflash2 = has_candidate_selector = True

    def __init__(
        self, draft_config: Any, spec: DraftSpec, executor: Executor, directory: Path, *, in_pool: bool = False
    ) -> None:
        """`directory` is the engine's, with the selector's tensors."""
        super().__init__(draft_config, spec, executor, in_pool=in_pool)
        self._spec = spec
        self._directory = directory
        self.candidate_selector: CandidateSelector | None = None

    def _build_fused_kv_buffers(self) -> None:
        """Read the selector, too: the executor has its GPU, and no cache exists yet."""
        super()._build_fused_kv_buffers()
        if self.candidate_selector is None:
            self.candidate_selector = CandidateSelector.read(self._directory, self._spec, self._executor.device)

    def select_candidate_path(
        self,
        block_logits: Tensor,
        candidate_ids: Tensor,
        unary_logits: Tensor,
        block_hidden_states: Tensor,
        anchor_token_ids: Tensor,
    ) -> Tensor:
        """block_logits [B, K, V] FLOAT, reduced in place to the scores of the greedy path's candidates.

        The argmax is the path; sampling a row gives one of its candidates. `candidate_ids` and `unary_logits`
        [B, K, k] are the best of block_logits, `block_hidden_states` [B, K, H] the final rows, and `anchor_token_ids`
        [B] the last verified tokens.
        """
        selector = self.candidate_selector
        assert selector is not None, "_build_fused_kv_buffers comes first"
        logits = selector.final_logits(unary_logits)
        rows = selector.lattice(block_hidden_states, anchor_token_ids, candidate_ids, logits).greedy_rows()
        return block_logits.float().fill_(-torch.inf).scatter_(-1, candidate_ids, rows)
