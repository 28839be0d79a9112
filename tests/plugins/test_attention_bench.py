# SPDX-License-Identifier: Apache-2.0
"""The attention benchmark's logic: its bytes, and that every peer is pointed at the rows that the kernel reads.

Libraries that need a GPU are stood in for by float64 attention behind the signatures that the calls were written for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from torch.nn.attention import SDPBackend

from benchmarks.attention_cases import Inputs, all_cases, as_bytes, make, make_inputs, moved_bytes
from benchmarks.attention_peers import (
    FlashAttention3,
    FlashInferCuteDsl,
    FlashInferDecode,
    FlashInferPrefill,
    Peer,
    Sdpa,
)
from benchmarks.bench_kv_injection_attention import main
from tests.plugins.calls import UNTOUCHED
from tests.plugins.cases import BF16, FP8, Case
from tests.plugins.compare import assert_close
from tests.plugins.kernel.oracle import expect

SMALL = Case(name="small", N=4, G=2, S=3)


def small(*lengths: int, cache: torch.dtype = BF16) -> Case:
    return replace(make(SMALL, cache, lengths), L=2)


def test_bytes_are_those_of_the_tensors() -> None:
    case = replace(small(20, 33, cache=FP8), L=1)
    given = make_inputs(case, "cpu").tensors
    row = case.G * case.D  # bytes of FP8
    caches = given.k_cache.nbytes + given.v_cache.nbytes
    unread = 2 * (2 * case.C_max - 20 - 33) * row
    everything = sum(tensor.nbytes for tensor in given.each()) + given.q.nbytes
    assert moved_bytes(case) == everything - unread
    assert caches - unread == 2 * 53 * row


def test_cases_cover_what_is_claimed() -> None:
    found = list(all_cases())
    assert all(case.C_max % 64 == 0 and case.C_max >= max(case.context_lengths) + case.S for case in found)
    assert any(case.G == 1 and set(case.context_lengths) == {4096} for case in found)
    assert any(len(set(case.context_lengths)) == 16 and case.cache_dtype is FP8 for case in found)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[S, N, D] of q, and k and v [rows, G, D], in float64."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weights = torch.einsum("snd,rnd->nsr", q.double(), k).mul(scale).softmax(dim=-1)
    return torch.einsum("nsr,rnd->snd", weights, v)


def install(monkeypatch: pytest.MonkeyPatch, name: str, *functions: Callable[..., object]) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    for function in functions:
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, name, module)


def get_scheduler_metadata(
    batch_size: int, max_seqlen_q: int, max_seqlen_k: int, num_heads_q: int, num_heads_kv: int, headdim: int,
    cache_seqlens: torch.Tensor, qkv_dtype: torch.dtype,
) -> tuple[int, ...]:  # fmt: skip
    assert cache_seqlens.dtype == torch.int32
    return batch_size, max_seqlen_q


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, cache_seqlens: torch.Tensor,
    softmax_scale: float, scheduler_metadata: tuple[int, ...], q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None, v_descale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    assert scheduler_metadata == q.shape[:2]
    assert q.dtype == k_cache.dtype == v_cache.dtype
    outputs = []
    for b, rows in enumerate(cache_seqlens.tolist()):
        of_q, of_k, of_v = (1.0 if x is None else x[b, :, None].double() for x in (q_descale, k_descale, v_descale))
        k, v = k_cache[b, :rows].double() * of_k, v_cache[b, :rows].double() * of_v
        assert torch.as_tensor(of_q).eq(1).all()
        outputs.append(attention(q[b], k, v, softmax_scale))
    return torch.stack(outputs)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert kv_layout == "NHD"

    def plan(
        self, qo_indptr: torch.Tensor, paged_kv_indptr: torch.Tensor, paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int,
        *, causal: bool, sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert not causal
        self.of_block = list(pairwise(qo_indptr.tolist()))
        ends = paged_kv_indptr.tolist()
        self.pages = [paged_kv_indices[begin:end] for begin, end in pairwise(ends)]
        self.last, self.scale = paged_kv_last_page_len.tolist(), sm_scale

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, k_scale: float, v_scale: float
    ) -> torch.Tensor:
        outputs = []
        for (begin, end), pages, last in zip(self.of_block, self.pages, self.last, strict=True):
            k, v = (cache[pages.long()].flatten(0, 1) for cache in paged_kv_cache)
            rows = (len(pages) - 1) * paged_kv_cache[0].shape[1] + last
            outputs.append(
                attention(q[begin:end], k[:rows].double() * k_scale, v[:rows].double() * v_scale, self.scale)
            )
        return torch.cat(outputs)


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor, kv_cache: tuple[torch.Tensor, torch.Tensor], workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int, *, bmm1_scale: float, bmm2_scale: float,
    out_dtype: torch.dtype, kv_layout: str, q_len_per_req: int, mask: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    assert kv_layout == "NHD"
    assert seq_lens.dtype == torch.uint32
    assert mask is not None
    assert mask.dtype == torch.uint16
    assert mask.shape == (len(seq_lens), q_len_per_req, 2)
    outputs = []
    for b, rows in enumerate(seq_lens.tolist()):
        assert rows <= max_seq_len
        k, v = (cache[block_tables[b].long()].flatten(0, 1)[:rows] for cache in kv_cache)
        q = query[b * q_len_per_req : (b + 1) * q_len_per_req]
        outputs.append(attention(q, k, v.double() * bmm2_scale, bmm1_scale))
    return torch.cat(outputs)


class BatchDecodePagedCuteDSLWrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == torch.float32

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, seq_lens: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, q_data_type: torch.dtype, o_data_type: torch.dtype,
        sm_scale: float, reduction: str, q_len_per_req: int, window_right: int | None, max_kv_len: int,
    ) -> None:  # fmt: skip
        assert window_right is None
        assert max_kv_len == seq_lens.max()
        self.pages = [indices[begin:end].long() for begin, end in pairwise(indptr.tolist())]
        self.rows, self.scale = seq_lens.tolist(), sm_scale

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *, o_scale: float) -> torch.Tensor:
        assert q.dtype == k_cache.dtype == v_cache.dtype
        outputs = []
        for of_request, table, rows in zip(q, self.pages, self.rows, strict=True):
            k, v = (cache[table].flatten(0, 1)[:rows] for cache in (k_cache, v_cache))
            outputs.append(attention(of_request, k, v.double() * o_scale, self.scale))
        return torch.stack(outputs)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn_interface", get_scheduler_metadata, flash_attn_with_kvcache)
    install(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper)
    install(monkeypatch, "cutlass")
    install(monkeypatch, "flashinfer.cute_dsl.attention", BatchDecodePagedCuteDSLWrapper)
    install(monkeypatch, "flashinfer.decode", trtllm_batch_decode_with_kv_cache)


def assert_right(peer: Peer, inputs: Inputs, floor: float = 0) -> None:
    """Every layer gives what the node means, from its own rows alone: the other layers' are NaN."""
    for layer in range(inputs.case.L):
        caches = [cache.clone() for cache in (inputs.tensors.k_cache, inputs.tensors.v_cache)]
        for cache in caches:
            as_bytes(cache)[:, [other for other in range(inputs.case.L) if other != layer]] = UNTOUCHED
        tensors = replace(inputs.tensors, k_cache=caches[0], v_cache=caches[1])
        exact = expect(replace(inputs.case, layer=layer), tensors)
        out = peer.prepare(replace(inputs, tensors=tensors))[layer]()
        assert_close(out.reshape(exact.output.shape), exact.output, exact.tolerance + floor)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    "peer",
    [FlashAttention3(), FlashInferPrefill("fa2"), FlashInferDecode(), FlashInferCuteDsl()],
    ids=lambda peer: peer.name,
)
@pytest.mark.parametrize("cache", [BF16, FP8])
def test_peers_read_the_rows_of_the_kernel(peer: Peer, cache: torch.dtype) -> None:
    case = small(130, 20, 61, 1, cache=cache)
    assert peer.refusal(case) is None
    # An FP8 cache has the block's rows in FP8, too, and FlashAttention-3 the queries.
    assert_right(peer, make_inputs(case, "cpu"), 0.4 if cache is FP8 else 0)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=lambda backend: backend.name)
def test_dense_peers_read_the_rows_of_the_kernel(backend: SDPBackend) -> None:
    assert_right(Sdpa(backend), make_inputs(small(20, 20), "cpu"), 0.02)  # torch rounds the weights


def test_who_cannot_read_the_same_bytes_is_left_out() -> None:
    peer = Sdpa(SDPBackend.CUDNN_ATTENTION)
    assert peer.refusal(small(20, 20)) is None
    assert peer.refusal(small(20, 20, cache=FP8)) == "reads no FP8 cache"
    assert peer.refusal(small(20, 21)) == "takes equal lengths only"
    assert "not installed" in str(FlashAttention3().refusal(small(20)))
    assert FlashAttention3().limit(small(20), (10, 3)) == "is for sm_90 only"


def test_a_dry_run_needs_no_gpu() -> None:
    result = CliRunner().invoke(main, ["--dry-run", "--only", "a rank of 8", "--peer", "cudnn"])
    assert result.exit_code == 0, result.output
    # 16 x 4,096 rows of one head of 64 in FP8, K and V.
    assert "8.4" in next(line for line in result.output.splitlines() if "16 x 4096" in line and "16.8" not in line)
    assert "without torch cudnn: reads no FP8 cache" in result.output
    assert "FlashInfer" not in result.output
