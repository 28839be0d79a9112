# SPDX-License-Identifier: Apache-2.0
"""Other attentions that read the cache where it is: in its format, with the block after each context.

Untimed preparation favours the peers: queries are normalised and rotated, the block's rows are in the cache, page
tables and schedules exist. Called as in these versions; on a GPU ran torch's cuDNN and flash, and FlashInfer
0.7.2.post1's fa2, fa3 and XQA:

  FlashAttention-3   Dao-AILab/flash-attention 01afd16, hopper/flash_attn_interface.py: flash_attn_with_kvcache and
                     get_scheduler_metadata; FP8 caches take FP8 queries and descales [B, G]; sm_90 only
  FlashInfer         flashinfer-ai/flashinfer 002920b, prefill.py: BatchPrefillWithPagedKVCacheWrapper, plan and run;
                     6b1a33f, decode.py: trtllm_batch_decode_with_kv_cache, which is XQA on sm_90 and sm_120 and
TensorRT-LLM's generated kernels on sm_100; 010a611, xqa.py: the mask's format;
cute_dsl/attention/wrappers/batch_decode.py at 5011f96: BatchDecodePagedCuteDSLWrapper, for sm_100
  torch              scaled_dot_product_attention with one backend allowed: cuDNN, and flash
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_cases import PAGE, Inputs
from tests.plugins.cases import FP8, Case

Call = Callable[[], torch.Tensor]
WORKSPACE_BYTES = 256 << 20
FULL_MASK = -1  # all bits


class Peer(ABC):
    """An attention of another library."""

    name: str
    module: str = "torch"
    install: str = ""

    def refusal(self, case: Case, capability: tuple[int, int] | None = None) -> str | None:
        """Why it is not called with this case, on a GPU of this compute capability; None if it is."""
        if find_spec(self.module) is None:
            return f"not installed: {self.install}"
        return self.limit(case, capability)

    def limit(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        """Preparation that the library does not do itself."""
        return None

    @abstractmethod
    def prepare(self, inputs: Inputs) -> list[Call]:
        """One call for each layer, whose output has B*S*N*D elements in the order of [B, S, N, D]."""


class DenseOnly(Peer):
    """Reads tensors of one length for all requests, in the format of the queries."""

    def limit(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        if case.cache_dtype is FP8:
            return "reads no FP8 cache"
        return "takes equal lengths only" if len(set(case.context_lengths)) > 1 else None

    def prepare(self, inputs: Inputs) -> list[Call]:
        queries, rows = inputs.queries.transpose(1, 2), inputs.lengths[0]

        def call(layer: int) -> Call:
            k, v = (cache[:, :rows].transpose(1, 2) for cache in inputs.layer(layer))
            return lambda: self.attend(queries, k, v, inputs.case.D**-0.5).transpose(1, 2)

        return [call(layer) for layer in range(inputs.case.L)]

    @abstractmethod
    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """[B, N, S, D] of q, and of k and v [B, G, rows, D]."""


class Sdpa(DenseOnly):
    """torch's attention by one of its backends."""

    def __init__(self, backend: SDPBackend) -> None:
        self.backend = backend
        self.name = f"torch {backend.name.removesuffix('_ATTENTION').lower()}"

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        with sdpa_kernel(self.backend):
            return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)


class FlashAttention3(Peer):
    """Hopper's, with the schedule of a step made once, as servers do."""

    name = "FlashAttention-3"
    module = "flash_attn_interface"
    install = "build hopper/ of github.com/Dao-AILab/flash-attention"

    def limit(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        return "is for sm_90 only" if capability is not None and capability[0] != 9 else None

    def prepare(self, inputs: Inputs) -> list[Call]:
        library: Any = import_module(self.module)
        case, device = inputs.case, inputs.queries.device
        lengths = torch.tensor(inputs.lengths, dtype=torch.int32, device=device)
        queries, scales = inputs.queries, {}
        if case.cache_dtype is FP8:
            queries = queries.to(FP8)
            for name, scale in (("q_descale", 1.0), ("k_descale", case.k_scale), ("v_descale", case.v_scale)):
                scales[name] = torch.full((case.B, case.G), scale, device=device)
        metadata = library.get_scheduler_metadata(
            case.B, case.S, case.C_max, case.N, case.G, case.D, lengths, qkv_dtype=queries.dtype
        )

        def call(layer: int) -> Call:
            k, v = inputs.layer(layer)
            return lambda: library.flash_attn_with_kvcache(
                queries, k, v, cache_seqlens=lengths, softmax_scale=case.D**-0.5, scheduler_metadata=metadata, **scales
            )

        return [call(layer) for layer in range(case.L)]


def pages(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """All layers' caches as pages [slots * L * C_max / PAGE, PAGE, G, D]."""
    case = inputs.case
    k, v = inputs.tensors.k_cache, inputs.tensors.v_cache
    return k.view(-1, PAGE, case.G, case.D), v.view(-1, PAGE, case.G, case.D)


def page_table(inputs: Inputs, layer: int) -> torch.Tensor:
    """Pages [B, C_max / PAGE] int32 of a layer."""
    case = inputs.case
    each = case.C_max // PAGE
    first = (torch.arange(case.B) * case.L + layer) * each
    return (first[:, None] + torch.arange(each)).int().to(inputs.queries.device)


class FlashInfer(Peer):
    """A part of FlashInfer."""

    module = "flashinfer"
    install = "pip install flashinfer-python"


class FlashInferPrefill(FlashInfer):
    """The wrapper that takes blocks of any size; each layer has a plan, since its pages are others."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = f"FlashInfer {backend}"

    def limit(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        if self.backend != "fa3":
            return None
        if case.cache_dtype is FP8:
            return "reads an FP8 cache with FP8 queries only, whose scales a head are not set up here"
        return "is for sm_90 only" if capability is not None and capability[0] != 9 else None

    def prepare(self, inputs: Inputs) -> list[Call]:
        library: Any = import_module(self.module)
        case, device = inputs.case, inputs.queries.device
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        used = [-(-rows // PAGE) for rows in inputs.lengths]
        ends = torch.tensor([0, *used]).cumsum(0).int().to(device)
        last = torch.tensor([(rows - 1) % PAGE + 1 for rows in inputs.lengths], dtype=torch.int32, device=device)
        blocks = torch.arange(case.B + 1, dtype=torch.int32, device=device) * case.S
        queries = inputs.queries.view(-1, case.N, case.D)

        def call(layer: int) -> Call:
            table = page_table(inputs, layer)
            indices = torch.cat([row[:count] for row, count in zip(table, used, strict=True)])
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=self.backend)
            wrapper.plan(
                blocks, ends, indices, last, case.N, case.G, case.D, PAGE, causal=False, sm_scale=case.D**-0.5,
                q_data_type=case.dtype, kv_data_type=case.cache_dtype,
            )  # fmt: skip
            return lambda: wrapper.run(queries, pages(inputs), k_scale=case.k_scale, v_scale=case.v_scale)

        return [call(layer) for layer in range(case.L)]


class FlashInferDecode(FlashInfer):
    """XQA, or on sm_100 TensorRT-LLM's generated kernels, which hide later block slots from earlier ones."""

    name = "FlashInfer XQA/trtllm-gen"

    def prepare(self, inputs: Inputs) -> list[Call]:
        library: Any = import_module(f"{self.module}.decode")
        case, device = inputs.case, inputs.queries.device
        blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        lengths = torch.tensor(inputs.lengths, dtype=torch.int32, device=device).view(torch.uint32)
        words = -(-case.S // 32) * 2
        mask = torch.full((case.B, case.S, words), FULL_MASK, dtype=torch.int16, device=device).view(torch.uint16)
        queries = inputs.queries.view(-1, case.N, case.D)
        if blackwell and case.cache_dtype is FP8:
            queries = queries.to(FP8)

        def call(layer: int) -> Call:
            table = page_table(inputs, layer)
            return lambda: library.trtllm_batch_decode_with_kv_cache(
                queries, pages(inputs), workspace, table, lengths, max(inputs.lengths),
                bmm1_scale=case.D**-0.5 * case.k_scale, bmm2_scale=case.v_scale, out_dtype=case.dtype, kv_layout="NHD",
                q_len_per_req=case.S, mask=None if blackwell or case.S == 1 else mask,
            )  # fmt: skip

        return [call(layer) for layer in range(case.L)]


class FlashInferCuteDsl(FlashInfer):
    """tcgen05 and TMA, written in CuTe DSL, which compiles it at plan(); the block's slots see each other."""

    name = "FlashInfer CuTe-DSL decode"
    install = "pip install flashinfer-python nvidia-cutlass-dsl"

    def refusal(self, case: Case, capability: tuple[int, int] | None = None) -> str | None:
        return super().refusal(case, capability) if find_spec("cutlass") else f"not installed: {self.install}"

    def limit(self, case: Case, capability: tuple[int, int] | None) -> str | None:
        if case.D % 64 != 0:
            return "takes a head_dim that 64 divides"
        return "is for sm_100 and sm_103 only" if capability is not None and capability[0] != 10 else None

    def prepare(self, inputs: Inputs) -> list[Call]:
        library: Any = import_module(f"{self.module}.cute_dsl.attention")
        case, device = inputs.case, inputs.queries.device
        lengths = torch.tensor(inputs.lengths, dtype=torch.int32, device=device)
        starts = torch.arange(case.B + 1, dtype=torch.int32, device=device) * (case.C_max // PAGE)
        queries = inputs.queries.to(case.cache_dtype)  # an FP8 cache takes FP8 queries
        workspace = torch.zeros(WORKSPACE_BYTES // 4, device=device)

        def call(layer: int) -> Call:
            wrapper = library.BatchDecodePagedCuteDSLWrapper(workspace)
            wrapper.plan(
                starts, page_table(inputs, layer).flatten(), lengths, case.N, case.G, case.D, PAGE,
                q_data_type=queries.dtype, o_data_type=case.dtype, sm_scale=case.D**-0.5 * case.k_scale,
                reduction="kernel", q_len_per_req=case.S, window_right=None, max_kv_len=max(inputs.lengths),
            )  # fmt: skip
            return lambda: wrapper.run(queries, *pages(inputs), o_scale=case.v_scale)

        return [call(layer) for layer in range(case.L)]


PEERS: tuple[Peer, ...] = (
    FlashAttention3(),
    FlashInferPrefill("fa2"),
    FlashInferPrefill("fa3"),
    FlashInferDecode(),
    FlashInferCuteDsl(),
    Sdpa(SDPBackend.CUDNN_ATTENTION),
    Sdpa(SDPBackend.FLASH_ATTENTION),
)
