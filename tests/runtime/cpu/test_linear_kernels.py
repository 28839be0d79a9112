# SPDX-License-Identifier: Apache-2.0
"""Linear layers in BF16 and in FP32 panels against float64, on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_trt import _C
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.cpu.linear_layers import (
    MIN_INPUTS,
    PanelLinear,
    lay_out_linear_layers,
    linear,
    openmp_team,
    panels,
    replace_linear_layers,
    rows_of,
)
from dflash_trt.runtime.targets.huggingface import make_target
from dflash_trt.runtime.targets.packed_target import agrees
from tests.runtime.targets.families import (
    NUM_SLOTS,
    TAPS,
    random_model,
)

BEHIND = 7.0
KERNELS: dict[torch.dtype, Callable[..., None]] = {torch.bfloat16: _C.linear_bfloat16, torch.float32: _C.linear_panels}
Case = tuple[torch.dtype, str]
"""Type of a kernel, and an instruction set."""


def has_bfloat16(isa: str) -> bool:
    empty = torch.empty(0, dtype=torch.bfloat16).data_ptr()
    try:
        _C.linear_bfloat16(empty, [0], empty, 0, 0, 0, empty, 1, 0, isa)
    except ValueError:
        return False
    return True


CASES: list[Case] = [
    *((torch.bfloat16, isa) for isa in ("avx512bf16", *_C.cpu_features()) if has_bfloat16(isa)),
    *((torch.float32, isa) for isa in _C.cpu_features()),
]
each_kernel = pytest.mark.parametrize("case", CASES, ids=[f"{str(dtype)[6:]}-{isa}" for dtype, isa in CASES])


def tensors(counts: Sequence[int], outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight for each count, and biases."""
    torch.manual_seed(sum(counts))
    shapes = (sum(counts), inputs), (len(counts), outputs, inputs), (len(counts), outputs)
    x, weights, biases = (torch.randn(shape).to(dtype) for shape in shapes)
    return x, weights, biases


def product(
    counts: Sequence[int], x: Tensor, weights: Tensor, biases: Tensor | None, isa: str, threads: int = 1
) -> Tensor:
    """Product of the kernel; a guard after it must not change."""
    _, N, K = weights.shape
    out = torch.full((len(x) * N + 64,), BEHIND, dtype=x.dtype)
    laid_out, (number, start) = panels(weights) if x.dtype == torch.float32 else weights, openmp_team()
    bias_at, threads = 0 if biases is None else biases.data_ptr(), min(threads, number)
    KERNELS[x.dtype](x.data_ptr(), counts, laid_out.data_ptr(), N, K, bias_at, out.data_ptr(), threads, start, isa)
    assert (out[len(x) * N :] == BEHIND).all()
    return out[: len(x) * N].view(len(x), N)


def check(counts: Sequence[int], outputs: int, inputs: int, case: Case) -> None:
    """BF16 is the nearest of the exact sum, or one beside it where that lies between two; FP32 rounds each product."""
    dtype, isa = case
    x, weights, biases = tensors(counts, outputs, inputs, dtype)
    each = list(zip(x.double().split(list(counts)), weights.double(), biases.double(), strict=True))
    exact = torch.cat([rows @ weight.T for rows, weight, _ in each])
    size = torch.cat([rows.abs() @ weight.abs().T for rows, weight, _ in each])
    shift = torch.cat([bias.expand(len(rows), -1) for rows, _, bias in each])
    limit = size * 1e-6 if dtype == torch.bfloat16 else inputs * 2**-24 * size + 1e-6
    ulp = 2**-8 if dtype == torch.bfloat16 else 2**-23
    plain = product(counts, x, weights, None, isa)
    assert ((plain.double() - exact).abs() <= limit + (exact.abs() * ulp if dtype == torch.bfloat16 else 0)).all()
    biased = product(counts, x, weights, biases, isa)
    assert ((biased.double() - exact - shift).abs() <= limit + ulp * (exact + shift).abs()).all()


@each_kernel
def test_any_number_of_rows_and_columns(case: Case) -> None:
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 33):
        for outputs in (1, 3, 15, 16, 17, 25, 63, 64, 65):
            check([rows], outputs, 20, case)


@each_kernel
def test_any_number_of_inputs(case: Case) -> None:
    for inputs in (1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 511, 512, 513, 1030, 2880):
        check([13], 83, inputs, case)


@each_kernel
@pytest.mark.parametrize("counts", [[3, 0, 9, 1], [0, 0, 2], [5, 0], [0, 0]])
def test_each_expert_has_its_own_rows(case: Case, counts: list[int]) -> None:
    check(counts, 70, 40, case)


@each_kernel
def test_a_row_depends_on_itself_alone(case: Case) -> None:
    dtype, isa = case
    x, weights, biases = tensors([29], 300, 600, dtype)
    whole = product([29], x, weights, biases, isa)
    for i in range(len(x)):
        assert torch.equal(product([1], x[i : i + 1].contiguous(), weights, biases, isa)[0], whole[i])
    assert torch.equal(product([29], x, weights, biases, isa, threads=2), whole)


@each_kernel
def test_ties_go_to_even_and_nan_stays(case: Case) -> None:
    """256 + 1 and 256 + 3 lie between two numbers of BF16, whose distance is 2 there."""
    dtype, isa = case
    weight, bias = torch.eye(2, dtype=dtype)[None], torch.tensor([[256.0, 256.0]], dtype=dtype)
    x = torch.tensor([[1.0, 3.0], [-1.0, torch.nan]], dtype=dtype)
    sums = [256, 260] if dtype == torch.bfloat16 else [257, 259]
    actual = product([2], x, weight, bias, isa).float().numpy()
    np.testing.assert_array_equal(actual, [sums, [np.nan, np.nan]])  # NaN * 0 is NaN


@each_kernel
def test_nan_stays_in_its_row_and_infinity_in_its_column(case: Case) -> None:
    dtype, isa = case
    x, weights, biases = tensors([7], 40, 30, dtype)
    x[3, 5], biases[0, 9] = torch.nan, torch.inf
    found = product([7], x, weights, biases, isa)
    assert found[3].isnan().all()
    others = found[[0, 1, 2, 4, 5, 6]]
    assert (others[:, 9] == torch.inf).all()
    assert others[:, [*range(9), *range(10, 40)]].isfinite().all()


def test_sums_are_the_same_on_instruction_sets_that_fuse() -> None:
    if "avx512" not in _C.cpu_features():
        pytest.skip("needs a CPU that has both")
    case = tensors([29], 300, 600, torch.float32)
    assert torch.equal(product([29], *case, "avx512"), product([29], *case, "avx2"))


@pytest.mark.parametrize("dtype", KERNELS)
def test_an_unknown_instruction_set_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="found mmx"):
        product([1], *tensors([1], 1, 1, dtype), "mmx")


@pytest.mark.parametrize("outputs", [1, 16, 30, 64])
def test_panels_hold_the_weight(outputs: int) -> None:
    weight = torch.randn(outputs, 12)
    assert torch.equal(rows_of(panels(weight), outputs), weight)


@pytest.mark.parametrize("dtype", KERNELS)
def test_as_a_layer_of_torch(dtype: torch.dtype) -> None:
    layer: Any = nn.Linear(48, 30, dtype=dtype)
    rows = torch.randn(2, 5, 96).to(dtype)[..., ::2]  # not dense
    ours = PanelLinear(layer) if dtype == torch.float32 else lambda x: linear(layer.weight.data, layer.bias.data, x)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    with torch.inference_mode():
        torch.testing.assert_close(ours(rows), layer(rows), rtol=tolerance, atol=tolerance)
        assert ours(rows[:, :0]).shape == (2, 0, 30)
        with pytest.raises(RuntimeError, match="dtype"):
            ours(rows.double())
        with pytest.raises(RuntimeError, match="shape"):
            ours(rows[..., :47])


@pytest.mark.parametrize("dtype", KERNELS)
def test_wide_layers_of_a_model_in_bf16_are_replaced(dtype: torch.dtype) -> None:
    config = Qwen3Config(
        hidden_size=MIN_INPUTS, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, vocab_size=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(dtype).eval()
    with torch.inference_mode():
        expected = model(torch.arange(9)[None]).logits
        replace_linear_layers(model)
        torch.testing.assert_close(model(torch.arange(9)[None]).logits, expected, rtol=2**-5, atol=2**-5)
    replaced = {name for name, module in model.named_modules() if "forward" in vars(module)}
    projections = ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    wide = {*(f"model.layers.0.{name}_proj" for name in projections), "lm_head"}
    assert replaced == (wide if dtype == torch.bfloat16 else set())


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_held_once_except_for_a_head_that_is_the_embeddings(tied: bool) -> None:
    model = random_model("llama", tie_word_embeddings=tied)
    layers = {name: module.weight.detach() for name, module in model.named_modules() if type(module) is nn.Linear}
    laid_out = sum(weight.numel() for name, weight in layers.items() if not (tied and name == "lm_head"))
    before = sum(weight.numel() for weight in model.parameters())
    lay_out_linear_layers(model)
    assert sum(weight.numel() for weight in model.parameters()) == before - laid_out
    assert all(torch.equal(model.get_submodule(name).weight, weight) for name, weight in layers.items())


def test_panels_are_for_fp32_alone() -> None:
    model = random_model("llama").bfloat16()
    lay_out_linear_layers(model)
    assert not [module for module in model.modules() if isinstance(module, PanelLinear)]


def test_a_block_has_the_logits_of_single_tokens_to_the_bit() -> None:
    """Torch's activations round the remainder after their last vector differently, so the layers are as wide as
    vectors.
    """
    assert agrees(make_target(random_model("llama", intermediate_size=64), TAPS, NUM_SLOTS, accelerate))
