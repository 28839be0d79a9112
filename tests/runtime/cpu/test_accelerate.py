# SPDX-License-Identifier: Apache-2.0
"""Norms, experts and other layers that ours replace: the values are transformers' own, and slower ways are said."""

from __future__ import annotations

import copy
import logging
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

from dflash_trt import _C
from dflash_trt.runtime import load
from dflash_trt.runtime.cpu import accelerate as accelerate_module
from dflash_trt.runtime.cpu.accelerate import PagedPass, accelerate, fuse_norms, normed, slow_parts
from dflash_trt.runtime.cpu.linear_layers import experts, group_experts
from dflash_trt.runtime.session import run
from dflash_trt.runtime.targets.packed_pass import GatheredPass
from dflash_trt.runtime.targets.packed_target import TORCH_OPERATORS
from tests.decoding import greedy, open_trained
from tests.fixtures_data import prompts
from tests.runtime.targets.families import EXPERTS, family_model, random_model


@pytest.mark.parametrize("name", ["tiny-qwen3", pytest.param("tiny-gpt-oss", marks=pytest.mark.full)])
def test_without_the_room_a_runtime_decodes_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own layers and attention by torch's operators, drafted and plain."""

    def decoded() -> list[list[list[int]]]:
        session = open_trained(name, max_batch_size=4, device="cpu")
        asked = prompts(session)[:4]
        decoders = session.decoder(), session.plain_decoder()
        runs = [run(decoder, [session.request(prompt, greedy(24)) for prompt in asked]) for decoder in decoders]
        pass_types.append(session.target._pass_type)  # type: ignore[attr-defined]
        return [[answer.token_ids for answer in answers] for answers in runs]

    pass_types: list[type] = []
    expected = decoded()
    monkeypatch.setattr(load, "accelerate", lambda _: TORCH_OPERATORS)
    for function in ("linear_panels", "linear_bfloat16", "rms_norm"):
        monkeypatch.delattr(_C, function)
    assert decoded() == expected
    assert expected[0] == expected[1], "greedy decoding is lossless"
    assert pass_types == [PagedPass, GatheredPass]


def test_a_model_on_another_device_stays_as_it_is() -> None:
    with torch.device("meta"):
        model = random_model("qwen3")
    before = dict(model.named_modules())
    assert accelerate(model) == TORCH_OPERATORS
    assert dict(model.named_modules()) == before
    assert not [module for module in model.modules() if "forward" in vars(module)]


def with_cpu(monkeypatch: pytest.MonkeyPatch, features: list[str], *, bfloat16: bool, openmp: int) -> None:
    monkeypatch.setattr(_C, "cpu_features", lambda: features)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
    monkeypatch.setattr(accelerate_module, "openmp_team", lambda: (2, openmp))


def test_the_best_cpu_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cpu(monkeypatch, ["avx512", "avx2", "scalar"], bfloat16=True, openmp=1)
    assert slow_parts(torch.float32) == slow_parts(torch.bfloat16) == []


@pytest.mark.parametrize(
    ("features", "dtype", "openmp", "message"),
    [
        (["scalar"], torch.float32, 1, "this CPU has neither AVX-512 nor AVX2"),
        (["avx2", "scalar"], torch.bfloat16, 1, "this CPU lacks AVX512-BF16 (it has avx2)"),
        (["avx512", "avx2", "scalar"], torch.bfloat16, 1, "this CPU lacks AVX512-BF16 (it has avx512)"),
        (["avx2", "scalar"], torch.float32, 0, "one of 2 threads is used"),
    ],
)
def test_a_slower_way_is_said_once_at_load(
    features: list[str],
    dtype: torch.dtype,
    openmp: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_cpu(monkeypatch, features, bfloat16=False, openmp=openmp)
    with caplog.at_level(logging.WARNING, "dflash_trt.runtime.cpu"):
        accelerate(random_model("qwen3").to(dtype))
    assert [message in record.getMessage() for record in caplog.records] == [True]


WIDE = {**EXPERTS, "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 512, "num_hidden_layers": 1}
FAMILIES = ("qwen3_moe", "gpt_oss", "mixtral")
"""The second has biases, and weights of the other order."""


def experts_of(model: PreTrainedModel) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("mlp.experts"))


def asked(num_rows: int, top_k: int = 2) -> tuple[Tensor, Tensor]:
    """Experts and their shares [num_rows, top_k]; the last expert is never asked."""
    generator = torch.Generator().manual_seed(num_rows)
    top = torch.rand(num_rows, 3, generator=generator).topk(top_k)
    return top.indices, top.values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_transformers_own(family: str, dtype: torch.dtype) -> None:
    """A row depends on itself alone, and only weights that were laid out are let go."""
    model = random_model(family, **WIDE).to(dtype)
    group_experts(laid_out := copy.deepcopy(model))
    theirs, ours = experts_of(model), experts_of(laid_out)
    stays = dtype == torch.bfloat16 and family != "gpt_oss"
    assert (ours.gate_up_proj.numel() > 0, ours.down_proj.numel() > 0) == (stays, stays)
    for num_rows in (1, 3, 40):
        rows = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
        indices, shares = asked(num_rows)
        with torch.inference_mode():
            found = experts(ours, rows, indices, shares.to(dtype))
            expected = grouped_mm_experts_forward(theirs, rows, indices, shares.to(dtype))
            last = experts(ours, rows[-1:], indices[-1:], shares[-1:].to(dtype))
        assert found.dtype == dtype
        assert torch.equal(last[0], found[-1])
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < (2**-7 if dtype == torch.bfloat16 else 1e-5)


def norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")}


def is_fused(module: nn.Module) -> bool:
    return isinstance(module.forward, partial)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3", "gemma2", "gemma3_text", "deepseek_v3", "olmo3", "qwen3_next"])
def test_a_familys_norms_stay_what_they_are(name: str) -> None:
    """Gemma's and Qwen3-Next's weights count from 1."""
    model = family_model(name)
    for module in norms(model).values():
        for weight in module.parameters():
            weight.uniform_(-0.5, 0.5)
    own = norms(copy.deepcopy(model))
    fuse_norms(model)
    assert all(map(is_fused, norms(model).values()))
    for path, module in norms(model).items():
        (weight,) = module.parameters()
        rows = torch.randn(3, 5, len(weight)).transpose(0, 1)
        torch.testing.assert_close(module(rows), own[path](rows), rtol=1e-5, atol=1e-6)


class OddRMSNorm(nn.Module):
    """Norm of another formula, which centres its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-6

    def forward(self, rows: Tensor) -> Tensor:
        centred = rows - rows.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight


def test_a_norm_of_another_formula_is_left_alone() -> None:
    model = random_model("qwen3")
    model.add_module("odd", OddRMSNorm())
    fuse_norms(model)
    assert not is_fused(model.odd)  # type: ignore[arg-type]
    assert is_fused(model.model.norm)


def test_bfloat16_is_left_alone() -> None:
    """A norm whose weight is FP32, too, for its rows are not."""
    model = random_model("qwen3").bfloat16()
    model.model.norm.float()
    fuse_norms(model)
    assert not any(map(is_fused, norms(model).values()))


@pytest.mark.parametrize("dim", [1, 15, 16, 33, 128])
def test_a_row_by_itself_has_the_same_bits(dim: int) -> None:
    """Compares one row, and enough rows for threads to share."""
    torch.manual_seed(dim)
    rows, weight = torch.randn(3 * 2**16 // dim, dim), torch.randn(dim)
    together = normed(weight, 1e-6, rows)
    for row in (0, 1, len(rows) - 1):
        assert torch.equal(normed(weight, 1e-6, rows[row]), together[row])
    expected = rows.double() * torch.rsqrt(rows.double().square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    torch.testing.assert_close(together.double(), expected, rtol=1e-5, atol=1e-6)
    assert normed(weight, 1e-6, rows[:0]).shape == (0, dim)
