# SPDX-License-Identifier: Apache-2.0
"""Linear layers in BF16 against float64, on every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash_trt import _C
from dflash_trt.runtime.cpu.bfloat16_linear import MIN_INPUTS, linear, replace_linear_layers
from dflash_trt.runtime.cpu.kernel_call import openmp_team


def usable(isa: str) -> bool:
    empty = torch.empty(0, dtype=torch.bfloat16).data_ptr()
    try:
        _C.linear_bfloat16(empty, [0], empty, 0, 0, 0, empty, 1, 0, isa)
    except ValueError:
        return False
    return True


ISAS = [isa for isa in ("avx512bf16", *_C.cpu_features()) if usable(isa)]
BEHIND = 7.0


def tensors(rows: int, outputs: int, inputs: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias."""
    torch.manual_seed(seed)
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in shapes)
    return x, weight, bias


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, isa: str, threads: int = 1, counts: Sequence[int] | None = None
) -> Tensor:
    """What is computed, by weights [E, N, K] if there are counts; a guard behind it must stay as it is."""
    (M, K), N = x.shape, weight.shape[-2]
    out = torch.full((M * N + 64,), BEHIND, dtype=torch.bfloat16)
    count, start = openmp_team()
    bias_at = 0 if bias is None else bias.data_ptr()
    _C.linear_bfloat16(
        x.data_ptr(), counts or [M], weight.data_ptr(), N, K, bias_at, out.data_ptr(), min(threads, count), start, isa
    )
    assert (out[M * N :] == BEHIND).all()
    return out[: M * N].view(M, N)


def assert_rounded_once(actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """BF16's nearest of the exact sum, or one beside it where that lies between two."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T
    assert ((actual.double() - exact).abs() <= exact.abs() * 2**-8 + size * 1e-6).all()


@pytest.mark.parametrize("isa", ISAS)
def test_any_number_of_rows_and_columns(isa: str) -> None:
    for rows in (0, 1, 2, 3, 4, 7, 8, 9, 17, 33):
        for outputs in (1, 2, 3, 23, 24, 25, 50):
            case = tensors(rows, outputs, 64, seed=rows)
            assert_rounded_once(product(*case, isa), *case)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("inputs", [1, 2, 15, 16, 17, 31, 32, 33, 63, 65, 2880])
def test_any_number_of_inputs(isa: str, inputs: int) -> None:
    x, weight, bias = tensors(11, 7, inputs)
    assert_rounded_once(product(x, weight, bias, isa), x, weight, bias)
    assert_rounded_once(product(x, weight, None, isa), x, weight, None)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_depends_on_itself_alone(isa: str) -> None:
    x, weight, bias = tensors(29, 100, 96)
    whole = product(x, weight, bias, isa)
    for i in range(len(x)):
        assert torch.equal(product(x[i : i + 1].contiguous(), weight, bias, isa)[0], whole[i])
    assert torch.equal(product(x, weight, bias, isa, threads=2), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("counts", [[3, 0, 9, 1], [0, 0, 2], [5, 0]])
def test_each_expert_has_its_own_rows(isa: str, counts: list[int]) -> None:
    torch.manual_seed(0)
    x, weights, biases = (
        torch.randn(shape).bfloat16() for shape in ((sum(counts), 40), (len(counts), 50, 40), (len(counts), 50))
    )
    actual = product(x, weights, biases, isa, counts=counts)
    for rows, found, weight, bias in zip(x.split(counts), actual.split(counts), weights, biases, strict=True):
        assert_rounded_once(found, rows, weight, bias)


@pytest.mark.parametrize("isa", ISAS)
def test_ties_go_to_even_and_nan_stays(isa: str) -> None:
    """256 + 1 and 256 + 3 lie between two numbers of BF16, whose distance is 2 there."""
    weight = torch.eye(2, dtype=torch.bfloat16)
    bias = torch.tensor([256.0, 256.0], dtype=torch.bfloat16)
    x = torch.tensor([[1.0, 3.0], [-1.0, torch.nan]], dtype=torch.bfloat16)
    actual = product(x, weight, bias, isa).float().numpy()
    np.testing.assert_array_equal(actual, [[256, 260], [np.nan, np.nan]])  # NaN * 0 is NaN


def test_an_unknown_instruction_set_is_refused() -> None:
    x, weight, bias = tensors(1, 1, 1)
    with pytest.raises(ValueError, match="found mmx"):
        product(x, weight, bias, "mmx")


def test_as_a_layer_of_torch() -> None:
    layer = nn.Linear(48, 30, dtype=torch.bfloat16)
    rows = torch.randn(2, 5, 96).bfloat16()[..., ::2]  # not dense
    with torch.inference_mode():
        actual = linear(layer.weight.data, layer.bias.data, rows)
        torch.testing.assert_close(actual, layer(rows), rtol=2**-7, atol=2**-7)
        with pytest.raises(RuntimeError, match="dtype"):
            linear(layer.weight.data, layer.bias.data, rows.float())
        with pytest.raises(RuntimeError, match="shape"):
            linear(layer.weight.data, layer.bias.data, rows[..., :47])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wide_layers_of_a_model_are_replaced(dtype: torch.dtype) -> None:
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
    wide = {
        f"model.layers.0.{name}_proj" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")
    }
    assert replaced == ({*wide, "lm_head"} if dtype == torch.bfloat16 else set())
