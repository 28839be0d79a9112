# SPDX-License-Identifier: Apache-2.0
"""Linear layers with weights in panels: against float64 on every instruction set, and in every family."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from dflash_trt import _C
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.cpu.kernel_call import openmp_team
from dflash_trt.runtime.cpu.panel_linear import PanelLinear, lay_out_linear_layers, panels, rows_of
from dflash_trt.runtime.targets.batch_invariance import agrees
from dflash_trt.runtime.targets.huggingface import make_target
from tests.runtime.targets.families import (
    NUM_SLOTS,
    TAPS,
    computed,
    random_history,
    random_model,
    recomputed,
    relative_error,
)
from tests.runtime.targets.test_slot_attention import PACKED

ISAS = _C.cpu_features()
BEHIND = 7.0


def tensors(counts: Sequence[int], outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight for each count, and biases."""
    torch.manual_seed(sum(counts))
    shapes = (sum(counts), inputs), (len(counts), outputs, inputs), (len(counts), outputs)
    x, weights, biases = (torch.randn(shape) for shape in shapes)
    return x, weights, biases


def products(
    counts: Sequence[int], x: Tensor, weights: Tensor, biases: Tensor | None, isa: str, threads: int = 1
) -> Tensor:
    """What is computed; a guard behind it must stay as it is."""
    _, N, K = weights.shape
    out = torch.full((len(x) * N + 64,), BEHIND)
    laid_out, (number, start) = panels(weights), openmp_team()
    bias_at = 0 if biases is None else biases.data_ptr()
    _C.linear_panels(
        x.data_ptr(), counts, laid_out.data_ptr(), N, K, bias_at, out.data_ptr(), min(threads, number), start, isa
    )
    assert (out[len(x) * N :] == BEHIND).all()
    return out[: len(x) * N].view(len(x), N)


def check(counts: Sequence[int], outputs: int, inputs: int, isa: str) -> None:
    x, weights, biases = tensors(counts, outputs, inputs)
    each = list(zip(x.double().split(list(counts)), weights.double(), biases.double(), strict=True))
    exact = torch.cat([rows @ weight.T for rows, weight, _ in each])
    size = torch.cat([rows.abs() @ weight.abs().T for rows, weight, _ in each])
    shift = torch.cat([bias.expand(len(rows), -1) for rows, _, bias in each])
    limit = inputs * 2**-24 * size + 1e-6
    assert ((products(counts, x, weights, None, isa).double() - exact).abs() <= limit).all()
    limit += 2**-23 * (exact + shift).abs()
    assert ((products(counts, x, weights, biases, isa).double() - exact - shift).abs() <= limit).all()


@pytest.mark.parametrize("isa", ISAS)
def test_any_number_of_rows_and_columns(isa: str) -> None:
    for rows in (0, 1, 2, 3, 5, 6, 7, 11, 12, 13, 33):
        for outputs in (1, 3, 15, 16, 17, 48, 63, 64, 65, 130):
            check([rows], outputs, 20, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("inputs", [1, 2, 15, 511, 512, 513, 1030])
def test_any_number_of_inputs(isa: str, inputs: int) -> None:
    check([13], 83, inputs, isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("counts", [[3, 0, 9, 1], [0, 0, 2], [5, 0], [0, 0]])
def test_each_expert_has_its_own_rows(isa: str, counts: list[int]) -> None:
    check(counts, 70, 24, isa)


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_depends_on_itself_alone(isa: str) -> None:
    x, weights, biases = tensors([29], 300, 600)
    whole = products([29], x, weights, biases, isa)
    for i in range(len(x)):
        assert torch.equal(products([1], x[i : i + 1].contiguous(), weights, biases, isa)[0], whole[i])
    assert torch.equal(products([29], x, weights, biases, isa, threads=2), whole)


def test_sums_are_the_same_on_instruction_sets_that_fuse() -> None:
    if "avx512" not in ISAS:
        pytest.skip("needs a CPU that has both")
    x, weights, biases = tensors([29], 300, 600)
    assert torch.equal(products([29], x, weights, biases, "avx512"), products([29], x, weights, biases, "avx2"))


@pytest.mark.parametrize("isa", ISAS)
def test_nan_stays_in_its_row_and_infinity_in_its_column(isa: str) -> None:
    x, weights, biases = tensors([7], 40, 30)
    x[3, 5], biases[0, 9] = torch.nan, torch.inf
    found = products([7], x, weights, biases, isa)
    assert found[3].isnan().all()
    others = found[[0, 1, 2, 4, 5, 6]]
    assert (others[:, 9] == torch.inf).all()
    assert others[:, [*range(9), *range(10, 40)]].isfinite().all()


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="found mmx"):
        products([1], *tensors([1], 1, 1), "mmx")


@pytest.mark.parametrize("outputs", [1, 16, 30, 64])
def test_panels_say_what_the_weight_was(outputs: int) -> None:
    weight = torch.randn(outputs, 12)
    assert torch.equal(rows_of(panels(weight), outputs), weight)


def test_as_a_layer_of_torch() -> None:
    layer = nn.Linear(48, 30)
    rows = torch.randn(2, 5, 96)[..., ::2]  # not dense
    ours = PanelLinear(layer)
    with torch.inference_mode():
        torch.testing.assert_close(ours(rows), layer(rows))
        assert ours(rows[:, :0]).shape == (2, 0, 30)
        with pytest.raises(RuntimeError, match="dtype"):
            ours(rows.double())
        with pytest.raises(RuntimeError, match="shape"):
            ours(rows[..., :47])


@pytest.mark.parametrize("name", PACKED)
def test_a_pass_is_the_models_own(name: str) -> None:
    """Every family, with all its linear layers and experts laid out."""
    model_type, settings = PACKED[name]
    model = random_model(model_type, **settings)
    expected = recomputed(copy.deepcopy(model), history := random_history(0, num_turns=3))
    target = make_target(model, TAPS, NUM_SLOTS, accelerate)
    assert not [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert not [key for key, weight in model.named_parameters() if "experts.gate_up" in key and weight.dim() == 3]
    assert relative_error(computed(target, history), expected) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_held_once_but_for_a_head_that_is_the_embeddings(tied: bool) -> None:
    model = random_model("llama", tie_word_embeddings=tied)
    linear = {name: module.weight.detach() for name, module in model.named_modules() if type(module) is nn.Linear}
    others = sum(weight.numel() for weight in model.parameters()) - sum(
        weight.numel() for name, weight in linear.items() if not (tied and name == "lm_head")
    )
    lay_out_linear_layers(model)
    assert sum(weight.numel() for weight in model.parameters()) == others
    assert all(torch.equal(model.get_submodule(name).weight, weight) for name, weight in linear.items())


def test_another_type_stays_as_it_is() -> None:
    model = random_model("llama").bfloat16()
    lay_out_linear_layers(model)
    assert not [module for module in model.modules() if isinstance(module, PanelLinear)]


def test_a_block_has_the_logits_of_single_tokens_to_the_bit() -> None:
    """Torch's activations round the rest behind their last vector otherwise, so the layers are as wide as vectors."""
    assert agrees(make_target(random_model("llama", intermediate_size=64), TAPS, NUM_SLOTS, accelerate))
