# SPDX-License-Identifier: Apache-2.0
"""Inputs of the cost model about drafts and machine: sizes, bits and ranks, and a drafter's small kernels.

Kernels between GEMMs and attention are counted in the source of the backend (data/backends.json). Each takes a fixed
time plus that for its reads and writes. Weights and attention are priced elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Literal

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.rope import Yarn
from dflash_trt.deploy.gpus import GpuSpec
from dflash_trt.deploy.resolved_deployment import ServingLoad
from dflash_trt.deploy.sizes import BF16_BITS
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.engine.signatures import fits_tiles
from dflash_trt.files.json_file import package_data
from dflash_trt.observe.estimate.constants import DATA

Width = Literal["hidden", "qkv", "heads", "mlp"]
GemmKind = Literal["qkv", "o", "gate_up", "down", ""]
When = Literal["", "bias", "plain RoPE", "scaled RoPE", "one number", "rows no multiple of 16", "unpadded"]
INPUT_WIDTHS: dict[GemmKind, Width] = {"qkv": "hidden", "o": "heads", "gate_up": "hidden", "down": "mlp", "": "hidden"}
ROW_MULTIPLE = 16
"""Rows of torch's FP8 product are a multiple of this."""


class LayerKernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal kernels of each layer."""

    what: str
    count: int
    width: Width
    values: float
    """BF16 numbers that each reads and writes, per number of a row of that width."""
    when: When = ""


class InputKernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Additional kernels of a quantised GEMM."""

    algorithm: str
    gemm: GemmKind = ""
    """Index within a layer; all if not given."""
    count: int
    values: float
    when: When = ""


class Backend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    source: str
    shown: str
    """Extent to which the counts were checked."""
    has_our_kernel: bool = False
    """Whether its attention is this project's kernel."""
    layer: tuple[LayerKernels, ...]
    once: int
    """Kernels of a pass outside the layers."""
    scalar_seconds: float = 0.0
    """Time of a kernel on one number: the low end of small_kernel_seconds, chosen after the FP8 passes were seen."""
    inputs: tuple[InputKernels, ...] = ()


class SmallKernels(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a pass; numbers are BF16, per row of the blocks."""

    count: int = 0
    hidden_values: float = 0.0
    """Numbers read and written on every rank."""
    shared_values: float = 0.0
    """Numbers of heads and MLPs, which ranks share."""
    scalar_seconds: float = 0.0
    """Time of the kernels on one number each, a scale."""
    count_unless_16: int = 0
    """Additional kernels unless the rows are a multiple of 16."""


@cache
def backends() -> dict[str, Backend]:
    return package_data(DATA / "backends.json", dict[str, Backend])


def small_kernels(backend: Backend, spec: PartialDraftSpec, gemms: Iterable[tuple[str, str]]) -> SmallKernels:
    """Kernels of a pass; `gemms` are those of all layers, each with the modules it is of and its algorithm."""
    widths: dict[Width, int] = {
        "hidden": spec.hidden_size, "heads": spec.num_attention_heads * spec.head_dim, "mlp": spec.intermediate_size,
        "qkv": (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim,
    }  # fmt: skip
    facts = {"", "bias" if spec.attention_bias else "", f"{'scaled' if _is_scaled(spec) else 'plain'} RoPE"}
    facts |= set() if fits_tiles(spec) else {"unpadded"}
    used = [(spec.num_layers * each.count, each.width, each.values, each.when) for each in backend.layer]
    for modules, algorithm in gemms:
        kind = _kind(modules)
        used += [
            (each.count, INPUT_WIDTHS[kind], each.values, each.when)
            for each in backend.inputs
            if each.algorithm == algorithm and each.gemm in ("", kind)
        ]
    always = [(count, width, values) for count, width, values, when in used if when in facts]
    hidden = sum(count * values for count, width, values in always if width == "hidden")
    return SmallKernels(
        count=backend.once + sum(count for count, _, _ in always),
        hidden_values=hidden * widths["hidden"],
        shared_values=sum(count * values * widths[width] for count, width, values in always if width != "hidden"),
        scalar_seconds=backend.scalar_seconds * sum(count for count, _, _, when in used if when == "one number"),
        count_unless_16=sum(count for count, _, _, when in used if when == "rows no multiple of 16"),
    )


def _kind(modules: str) -> GemmKind:
    kinds: dict[str, GemmKind] = {"self_attn": "qkv", "o_proj": "o", "mlp": "gate_up", "down_proj": "down"}
    return kinds.get(modules.rpartition(".")[2], "")


def _is_scaled(spec: PartialDraftSpec) -> bool:
    """Whether the RoPE is YaRN's; published facts leave it out, and drafts with biases are gpt-oss's, which have it."""
    return spec.attention_bias if spec.rope is None else isinstance(spec.rope.scaling, Yarn)


Method = Literal["none", "ngram", "mtp", "eagle3", "dflash"]
METHODS: tuple[Method, ...] = ("none", "ngram", "mtp", "eagle3", "dflash")


class Gemm(msgspec.Struct, frozen=True):
    """Weights of one format, each read once per pass, in one or several kernels."""

    params: float
    bits: float = BF16_BITS
    """Bits of a weight, scales included."""
    kernels: int = 1
    compute_bits: float | None = None
    """Bits of the arithmetic, if not those of the weights."""


class DraftShape(msgspec.Struct, frozen=True, kw_only=True):
    """A drafter: DFlash's (one pass over a block), EAGLE-3's or the target's MTP layer (`is_chain`: one pass for each
    draft), or n-grams, which have no layer.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_key_value_heads: int
    head_dim: int
    num_taps: int
    max_draft_tokens: int
    """K at most: the block's proposals, or the longest chain that is considered."""
    gemms: dict[str, tuple[Gemm, ...]]
    """By term of a step, over all layers; those of convolutions and selector are whole on each rank."""
    head_rows: int = 0
    """Rows of its own head; 0: the target's lm_head."""
    num_convolutions: int = 0
    """Block convolutions of DFlash2, each with two sides."""
    gathered_values: int = 0
    """Values gathered from DFlash2's codebooks per draft token: two rows per candidate."""
    first_proposing_row: int = 1
    """Rows of a block that make no proposal."""
    num_expert_layers: int = 0
    """Layers with the target's experts, which `gemms` leave out."""
    is_chain: bool = False
    runs_whole_block: bool = False
    """Whether every pass computes the whole block, even if few draft tokens are verified (engine mode)."""
    has_our_kernel: bool = False
    """Whether its attention is this project's kernel, which was measured."""
    small_kernels: SmallKernels = SmallKernels()
    """Kernels of a pass other than GEMMs and attention; a chain's are counted like the target's."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    target: TargetShape
    draft: DraftShape | None
    eagle3: DraftShape | None
    mtp: DraftShape | None = None
    ngram: DraftShape | None = None
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
    memory: ServingLoad | None = None
    """The deployment's memory on each GPU, for plain decoding and DFlash; None if only speed is estimated."""

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
        """The drafter of a method; None for plain decoding, or if the system has none."""
        drafters = {"ngram": self.ngram, "mtp": self.mtp, "eagle3": self.eagle3, "dflash": self.draft}
        return drafters.get(method)

    @property
    def methods(self) -> tuple[Method, ...]:
        """Plain decoding, and those with a drafter."""
        return tuple(method for method in METHODS if method == "none" or self.drafter(method) is not None)
