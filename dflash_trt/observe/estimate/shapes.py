# SPDX-License-Identifier: Apache-2.0
"""What the cost model must know of models and machine: sizes, bits and ranks. Values only."""

from __future__ import annotations

from typing import Literal

import msgspec

from dflash_trt.checkpoint.target_cache import TargetCache
from dflash_trt.deploy import memory
from dflash_trt.deploy.gpus import GpuSpec
from dflash_trt.deploy.sizes import BF16_BITS
from dflash_trt.observe.estimate.backends import SmallKernels

Method = Literal["none", "eagle3", "dflash"]
METHODS: tuple[Method, ...] = ("none", "eagle3", "dflash")


class LatentHeads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Widths of multi-head latent attention, as DeepSeek V3's config.json names them."""

    q_lora_rank: int
    """0: q is one projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


class TargetShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A target: layers of attention (full, sliding, latent) or gated delta nets, and of dense MLPs or experts."""

    target: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    cache: TargetCache
    """What its layers keep of a request: the kinds of its layers, and their bytes."""
    latent: LatentHeads | None = None
    has_output_gate: bool = False
    """Whether q brings a gate for what its heads give, and so is twice as wide (Qwen3-Next, Qwen3.5)."""
    linear_gate_rank: int = 0
    """Rank of a delta net's two channel gates (Kimi delta attention); 0: z, and two gates a head."""
    has_shared_values: bool = False
    """Whether full layers take their keys for values, too (Gemma 4)."""
    vocab_size: int
    intermediate_size: int
    """Width of the MLP in layers without experts."""
    num_dense_layers: int = 0
    """Layers without experts, where others have them."""
    num_experts: int = 0
    """Experts of each other layer; 0: the target is dense."""
    top_k: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    """Width of the shared MLP beside the experts, which every token passes."""
    expert_bits: float = 16
    weight_bits: float = 16
    """Bits of a weight of attention and dense MLPs."""
    head_bits: float = 16
    """Bits of a weight of embedding and lm_head."""

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def num_linear_layers(self) -> int:
        """Gated delta nets."""
        return self.cache.recurrent.num_layers if self.cache.recurrent else 0

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - self.num_linear_layers

    @property
    def attention_params(self) -> int:
        """Parameters of the projections that ranks share: q, k, v and o, and a delta net's."""
        H, N, cache = self.hidden_size, self.num_attention_heads, self.cache
        if (heads := self.latent) is not None:
            queries = N * (heads.qk_nope_head_dim + heads.qk_rope_head_dim)
            latent = heads.kv_lora_rank * N * (heads.qk_nope_head_dim + heads.v_head_dim)
            layer = (heads.q_lora_rank or H) * queries + latent + N * heads.v_head_dim * H
            return self.num_attention_layers * layer + self._linear_params
        full = (cache.full_key_value_heads or cache.num_key_value_heads, cache.full_head_dim or cache.head_dim)
        sliding = (cache.num_key_value_heads, cache.head_dim)
        total = self._linear_params
        for layers, (groups, head_dim) in ((cache.num_full_layers, full), (cache.num_sliding_layers, sliding)):
            total += layers * H * head_dim * ((2 + self.has_output_gate) * N + 2 * groups)
        return total - self.has_shared_values * cache.num_full_layers * H * full[0] * full[1]

    @property
    def replicated_attention_params(self) -> int:
        """Parameters that every rank keeps whole: latent attention's down projections, which all heads share."""
        if self.latent is None:
            return 0
        width = self.latent.q_lora_rank + self.latent.kv_lora_rank + self.latent.qk_rope_head_dim
        return self.num_attention_layers * self.hidden_size * width

    @property
    def _linear_params(self) -> int:
        """Parameters of the delta nets: q, k, v, output and gates."""
        if (state := self.cache.recurrent) is None:
            return 0
        H, rank, heads = self.hidden_size, self.linear_gate_rank, state.num_value_heads
        keys, values = state.num_key_heads * state.key_head_dim, heads * state.value_head_dim
        gates = H * heads + 2 * rank * (H + values) if rank else H * (values + 2 * heads)
        return state.num_layers * (H * (2 * keys + 2 * values) + gates)

    def attention_flops(self, tokens: float, rows: float, ranks: int, *, is_prompt: bool) -> float:
        """Flops of `tokens` that each see `rows` rows, summed over layers, on one of `ranks` ranks.

        Latent attention decodes on the rows as they are kept, whose heads are wide; prompts are widened first.
        """
        queries = -(-self.num_attention_heads // ranks)
        if self.latent is None:
            return 4 * tokens * rows * queries * (self.cache.full_head_dim or self.cache.head_dim)
        if is_prompt:
            widths = self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim + self.latent.v_head_dim
        else:
            widths = 2 * self.latent.kv_lora_rank + self.latent.qk_rope_head_dim
        return 2 * tokens * rows * queries * widths

    @property
    def mlp_params(self) -> int:
        """Parameters of all dense MLPs, including those beside experts."""
        dense = (self.num_layers - self.num_expert_layers) * self.intermediate_size
        return 3 * self.hidden_size * (dense + self.num_expert_layers * self.shared_intermediate_size)

    @property
    def expert_params(self) -> int:
        return 3 * self.hidden_size * self.expert_intermediate_size

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def dense_params(self) -> int:
        """Parameters except experts and vocabulary; without norms, biases, routers, convolutions and indices."""
        return self.attention_params + self.replicated_attention_params + self.mlp_params

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied with, without lm_head."""
        return self.dense_params + self.num_expert_layers * self.top_k * self.expert_params

    @property
    def weight_bytes(self) -> float:
        """All of the target, embedding included."""
        experts = self.num_expert_layers * self.num_experts * self.expert_params * self.expert_bits / 8
        return self.dense_params * self.weight_bits / 8 + experts + 2 * self.head_params * self.head_bits / 8


class Gemm(msgspec.Struct, frozen=True):
    """Weights of one format, each read once a pass, in one or several kernels."""

    params: float
    bits: float = BF16_BITS
    """Bits of a weight, scales included."""
    kernels: int = 1
    compute_bits: float | None = None
    """Bits of the arithmetic, if not those of the weights."""


class DraftShape(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter: DFlash's (one pass over a block), or EAGLE-3's (`is_chain`: one pass for each draft)."""

    name: str
    num_layers: int
    hidden_size: int
    num_key_value_heads: int
    head_dim: int
    num_taps: int
    max_draft_tokens: int
    """K at most: the block's proposals, or the longest chain that is considered."""
    gemms: dict[str, tuple[Gemm, ...]]
    """By the term of a step that they are, all layers together; those of convolutions and selector whole on a rank."""
    head_rows: int = 0
    """Rows of a head of its own; 0: the target's lm_head."""
    num_convolutions: int = 0
    """Block convolutions of DFlash2, each with two sides."""
    gathered_values: int = 0
    """Values gathered from DFlash2's codebooks per draft token: two rows per candidate."""
    first_proposing_row: int = 1
    """Rows of a block that propose nothing."""
    is_chain: bool = False
    runs_whole_block: bool = False
    """Whether every pass computes the whole block, however few drafts are verified (engine mode)."""
    has_our_kernel: bool = False
    """Whether its attention is this project's kernel, which was measured."""
    small_kernels: SmallKernels = SmallKernels()
    """Kernels of a pass beside GEMMs and attention; a chain's are counted as the target's are."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    target: TargetShape
    draft: DraftShape | None
    eagle3: DraftShape | None
    gpu: GpuSpec
    gpu_memory_bytes: int
    num_gpus: int
    tensor_parallel: int
    expert_parallel: int
    drafter_ranks: int
    """Ranks that share one DFlash drafter."""
    runtime: str
    attention_dp: bool = False
    """Whether a rank keeps all but the experts whole, for requests of its own."""
    kv_bytes: int = 2
    """Bytes of a K or V element in the target's cache."""
    draft_kv_bytes: int = 2
    """Bytes of a K or V element in the drafter's context."""
    max_batch_size: int = 64
    max_seq_len: int = 32768
    max_num_tokens: int = 16384
    memory: memory.ServingLoad | None = None
    """What the deployment asks of each GPU, for plain decoding and DFlash; None: only speed is asked for."""

    @property
    def dense_ranks(self) -> int:
        """Ranks that share attention, dense MLPs and lm_head."""
        return 1 if self.attention_dp else self.tensor_parallel

    @property
    def replicas(self) -> int:
        """Ranks, or groups of them, among which requests are divided."""
        return self.tensor_parallel // self.dense_ranks

    def ranks_of_drafter(self, method: Method) -> int:
        """Ranks that share a method's drafter: EAGLE-3's is the runtime's own, divided as the target is."""
        return self.drafter_ranks if method == "dflash" else self.dense_ranks

    def drafter(self, method: Method) -> DraftShape | None:
        """The drafter of a method; None for plain decoding, and where the system has none."""
        return {"none": None, "eagle3": self.eagle3, "dflash": self.draft}[method]
