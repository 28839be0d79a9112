# SPDX-License-Identifier: Apache-2.0
"""What the cost model must know of drafts and machine: sizes, bits and ranks. Values only."""

from __future__ import annotations

from typing import Literal

import msgspec

from dflash_trt.deploy import memory
from dflash_trt.deploy.gpus import GpuSpec
from dflash_trt.deploy.sizes import BF16_BITS
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.observe.estimate.backends import SmallKernels

Method = Literal["none", "eagle3", "dflash"]
METHODS: tuple[Method, ...] = ("none", "eagle3", "dflash")


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
