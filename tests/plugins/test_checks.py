# SPDX-License-Identifier: Apache-2.0
"""Invalid calls: each error names the tensor or attribute, the expected and the actual value."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_trt import _C
from tests.plugins.cases import BF16, F16, FP8, Case
from tests.plugins.tensors import Tensors, attributes, draw, inputs, reference

CASE = Case(name="plain", S=3, N=4, G=2, D=64, L=2, layer=1, C_max=9, slots=3, context_lengths=(9, 4))


def refused(case: Case, tensors: Tensors | None = None) -> str:
    with pytest.raises(ValueError, match="expected") as caught:
        reference(case, draw(case) if tensors is None else tensors)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (replace(CASE, context_lengths=(1,) * 257, C_max=1, slots=257), "batch: expected 0 to 256, found 257"),
        (replace(CASE, S=0), "block: expected 1 to 32, found 0"),
        (replace(CASE, S=33), "block: expected 1 to 32, found 33"),
        (replace(CASE, N=1026, S=1), "num_heads: expected 1 to 1024, found 1026"),
        (replace(CASE, N=0), "num_heads: expected 1 to 1024, found 0"),
        (replace(CASE, G=0), "num_kv_heads: expected 1 to 1024, found 0"),
        (replace(CASE, N=7, G=3), "num_kv_heads: expected a divisor of num_heads 7, found 3"),
        (replace(CASE, D=80), "head_dim: expected 64, 96, 128 or 256, found 80"),
        (replace(CASE, D=512), "head_dim: expected 64, 96, 128 or 256, found 512"),
        (replace(CASE, window=-1), "sliding_window: expected at least 0, found -1"),
        (replace(CASE, softmax_scale=-1.0), "softmax_scale: expected a positive finite number, found -1"),
        (replace(CASE, softmax_scale=float("inf")), "softmax_scale: expected a positive finite number, found inf"),
        (replace(CASE, cache_dtype=FP8, k_scale=0.0), "k_scale: expected a positive finite number, found 0"),
        (replace(CASE, cache_dtype=FP8, v_scale=float("nan")), "v_scale: expected a positive finite number, found nan"),
        (replace(CASE, cache_dtype=FP8, k_scale=1000.0), "softmax_scale * k_scale: expected at most 64, found 125"),
        (
            replace(CASE, cache_dtype=FP8, k_scale=1e-6),
            "softmax_scale * k_scale: expected at least 6.10352e-05, found 1.25e-07",
        ),
        (
            replace(CASE, dtype=F16, cache_dtype=F16, softmax_scale=1e-5),
            "softmax_scale * k_scale: expected at least 6.10352e-05, found 1e-05",
        ),
        (replace(CASE, k_scale=0.5), "k_scale: expected 1 for a bfloat16 cache, found 0.5"),
        (replace(CASE, v_scale=2.0), "v_scale: expected 1 for a bfloat16 cache, found 2"),
        (replace(CASE, dtype=torch.float32), "qkv: expected dtype float16 or bfloat16, found float32"),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value) if isinstance(value, str) else "",
)
def test_sizes_and_attributes(case: Case, message: str) -> None:
    tensors = draw(case) if case.k_scale else draw(replace(case, k_scale=1.0))
    assert refused(case, tensors) == message


@pytest.mark.parametrize(("name", "value"), [("layer", 2), ("layer", -1), ("causal", 2), ("rms_norm_eps", 0.0)])
def test_attributes_that_a_case_cannot_have(name: str, value: float) -> None:
    expected = {"layer": "0 to 1", "causal": "0 to 1", "rms_norm_eps": "a positive finite number"}[name]
    tensors = draw(CASE)
    wrong = _C.KVInjectionAttributes(**(CASE.attributes() | {name: value}))
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}, found {value:g}$"):
        _C.kv_injection_attention_reference(wrong, list(inputs(CASE, tensors).values()), torch.empty_like(tensors.q))


def cut(axis: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.narrow(axis, 1, tensor.shape[axis] - 1).contiguous()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qkv", lambda qkv: qkv[0], "qkv: expected at least 6 rows, found 3"),
        ("qkv", cut(2), "qkv: expected shape [2, 3, 512], found [2, 3, 511]"),
        ("qkv", lambda qkv: qkv[..., :256].contiguous(), "qkv: expected shape [2, 3, 512], found [2, 3, 256]"),
        ("q_norm", cut(0), "q_norm: expected shape [64], found [63]"),
        ("k_norm", cut(0), "k_norm: expected shape [64], found [63]"),
        ("rope", cut(2), "rope: expected shape [2, 3, 64], found [2, 3, 63]"),
        ("context_pointers", lambda p: p[None], "context_pointers: expected shape [any, 2], found [1, 2, 2]"),
        ("context_pointers", cut(1), "context_pointers: expected shape [any, 2], found [2, 1]"),
        ("context_layout", cut(0), "context_layout: expected shape [6], found [5]"),
        ("page_table", lambda t: t[0], "page_table: expected shape [any, any], found [1]"),
        ("slot_ids", cut(0), "slot_ids: expected shape [2], found [1]"),
        ("context_lengths", cut(0), "context_lengths: expected shape [2], found [1]"),
        ("qkv_bias", cut(0), "qkv_bias: expected shape [512], found [511]"),
        ("sinks", cut(0), "sinks: expected shape [4], found [3]"),
        ("q_norm", torch.Tensor.half, "q_norm: expected dtype bfloat16, found float16"),
        ("k_norm", torch.Tensor.float, "k_norm: expected dtype bfloat16, found float32"),
        ("rope", torch.Tensor.bfloat16, "rope: expected dtype float32, found bfloat16"),
        ("context_pointers", torch.Tensor.int, "context_pointers: expected dtype int64, found int32"),
        ("page_table", torch.Tensor.long, "page_table: expected dtype int32, found int64"),
        ("slot_ids", torch.Tensor.long, "slot_ids: expected dtype int32, found int64"),
        ("context_lengths", torch.Tensor.float, "context_lengths: expected dtype int32, found float32"),
        ("qkv_bias", torch.Tensor.float, "qkv_bias: expected dtype bfloat16, found float32"),
        ("sinks", torch.Tensor.bfloat16, "sinks: expected dtype float32, found bfloat16"),
        ("qkv", lambda qkv: qkv.mT.contiguous().mT, "qkv: expected a dense row-major tensor, found strides"),
    ],
)  # fmt: skip
def test_tensors(name: str, change: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    case = replace(CASE, sinks=True, bias=True)
    tensors = draw(case)
    out = torch.empty_like(tensors.q)
    given = inputs(case, tensors)
    changed = list((given | {name: change(given[name])}).values())
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _C.kv_injection_attention_reference(attributes(case), changed, out)


def test_the_output() -> None:
    tensors = draw(CASE)
    for out, message in (
        (torch.empty(2, 3, 255, dtype=BF16), r"out: expected shape \[2, 3, 256\], found \[2, 3, 255\]"),
        (torch.empty(2, 3, 256), "out: expected dtype bfloat16, found float32"),
        (torch.empty(2, 256, 3, dtype=BF16).mT, "out: expected a dense row-major tensor"),
        (torch.empty(6, 256, dtype=BF16), r"out: expected shape \[2, 3, 256\], found \[6, 256\]"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.kv_injection_attention_reference(attributes(CASE), list(inputs(CASE, tensors).values()), out)
    fp8 = replace(CASE, output_scale=0.5)
    with pytest.raises(ValueError, match="out: expected dtype float8_e4m3fn, found bfloat16"):
        _C.kv_injection_attention_reference(attributes(fp8), list(inputs(fp8, tensors).values()), tensors.q.clone())


def test_rows_of_all_requests_may_be_one_axis() -> None:
    tensors = draw(CASE)
    joined = inputs(CASE, tensors) | {"qkv": tensors.qkv.flatten(0, 1)}
    out = torch.empty(6, 256, dtype=BF16)
    _C.kv_injection_attention_reference(attributes(CASE), list(joined.values()), out)
    assert torch.equal(out.view(2, 3, 256), reference(CASE, tensors))
    padding = torch.full((2, 512), torch.nan, dtype=BF16)
    padded = joined | {"qkv": torch.cat([joined["qkv"], padding])}
    room = torch.full((8, 256), 7.0, dtype=BF16)
    _C.kv_injection_attention_reference(attributes(CASE), list(padded.values()), room)
    assert torch.equal(room[:6], out)
    assert (room[6:] == 7).all()
    with pytest.raises(ValueError, match=r"out: expected shape \[8, 256\], found \[6, 256\]"):
        _C.kv_injection_attention_reference(attributes(CASE), list(padded.values()), out)


@pytest.mark.parametrize("count", [8, 11])
def test_the_number_of_inputs(count: int) -> None:
    tensors = draw(replace(CASE, sinks=True))
    some = [*inputs(CASE, tensors).values()][:1] * count
    with pytest.raises(ValueError, match=f"inputs: expected 9 tensors, or 10 with sinks, found {count}"):
        _C.kv_injection_attention_reference(attributes(CASE), some, tensors.q.clone())


def test_alignment_numpy_arrays_and_inputs_left_alone() -> None:
    """Rows are moved 16 bytes at a time; a view that begins between is dense all the same."""
    tensors = draw(CASE)
    shifted = torch.empty(tensors.qkv.numel() + 1, dtype=BF16)[1:].view(tensors.qkv.shape)
    assert re.fullmatch(
        "qkv: expected an address that 16 divides, found 0x[0-9a-f]*2", refused(CASE, replace(tensors, qkv=shifted))
    )
    case = replace(CASE, dtype=F16, cache_dtype=F16)
    tensors = draw(case)
    out = np.empty(tensors.q.shape, dtype=np.float16)
    _C.kv_injection_attention_reference(
        attributes(case), [tensor.numpy() for tensor in inputs(case, tensors).values()], out
    )
    assert np.array_equal(out, reference(case, tensors).numpy())
    tensors = draw(CASE)
    before = [tensor.clone() for tensor in tensors.each()]
    reference(CASE, tensors)
    for tensor, copy in zip(tensors.each(), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))


def test_what_asks_for_cuda_tensors() -> None:
    tensors = draw(CASE)
    with pytest.raises(ValueError, match="qkv: expected a CUDA tensor, found a CPU tensor"):
        _C.kv_injection_attention(
            attributes(CASE), list(inputs(CASE, tensors).values()), tensors.q.clone(), tensors.q.clone(), 0
        )
    # A single request of a long context is split among many blocks, whose parts need room
    long = Case(name="long", context_lengths=(30_000,))
    tensors = draw(long)
    assert (
        _C.kv_injection_attention_workspace_bytes(
            attributes(long), list(inputs(long, tensors).values()), tensors.q.clone()
        )
        > 0
    )
    wrong = draw(replace(CASE, S=40))
    with pytest.raises(ValueError, match="block: expected 1 to 32"):
        _C.kv_injection_attention_workspace_bytes(attributes(CASE), list(inputs(CASE, wrong).values()), wrong.q.clone())
