# SPDX-License-Identifier: Apache-2.0
"""Linear layers and experts in oneDNN's layout: the same products and tokens, and no large weight held twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_trt.targets import prepacked_experts, prepacked_linear
from dflash_trt.targets.huggingface import make_target
from dflash_trt.targets.prepacked_experts import prepack_experts
from dflash_trt.targets.prepacked_linear import prepack, weight_of
from dflash_trt.targets.target import Segment
from tests.targets.families import (
    EXPERTS,
    NUM_SLOTS,
    TAPS,
    computed,
    random_history,
    random_model,
    recomputed,
    relative_error,
)
from tests.targets.test_slot_attention import PACKED


class Operators(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: set[object] = set()

    def __torch_dispatch__(
        self, operator: torch._ops.OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        self.packets.add(operator.overloadpacket)
        return operator(*args, **(kwargs or {}))


pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs a torch with oneDNN")


@pytest.mark.parametrize("name", PACKED)
def test_a_pass_is_the_models_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family, with all its linear layers and experts laid out."""
    model_type, settings = PACKED[name]
    model = random_model(model_type, **settings)
    expected = recomputed(copy.deepcopy(model), history := random_history(0, num_turns=3))
    for module in (prepacked_linear, prepacked_experts):
        monkeypatch.setattr(module, "MIN_BYTES", 0)
    target = make_target(model, TAPS, NUM_SLOTS)
    assert any(weight.numel() == 0 for weight in model.parameters())
    assert not [key for key, weight in model.named_parameters() if "experts.gate_up" in key and weight.dim() == 3]
    assert relative_error(computed(target, history), expected) < 1e-4


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_held_once_but_for_a_head_that_is_the_embeddings(tied: bool) -> None:
    settings = {"hidden_size": 512, "vocab_size": 1024, "intermediate_size": 512, "tie_word_embeddings": tied}
    model = random_model("llama", **settings)
    head, down = model.lm_head.weight.detach().clone(), model.model.layers[0].mlp.down_proj
    before = down.weight.detach().clone()
    prepack(model)
    assert down.weight.numel() == 0
    assert model.model.layers[0].self_attn.k_proj.weight.numel() > 0, "too small to pay"
    assert model.lm_head.weight.numel() == (head.numel() if tied else 0)
    assert torch.equal(weight_of(down), before)
    assert torch.equal(weight_of(model.lm_head), head)
    rows = torch.randn(2, 3, 512)
    assert torch.allclose(down(rows), rows @ before.T, atol=1e-5)
    assert down(rows[:, :0]).shape == (2, 0, 512)


@pytest.mark.parametrize("bias", [False, True])
def test_a_small_weight_is_held_in_both_layouts_and_the_product_says_which_one_multiplies(bias: bool) -> None:
    model = random_model("llama", hidden_size=128, intermediate_size=256, mlp_bias=bias)
    up = model.model.layers[0].mlp.up_proj
    before = copy.deepcopy(up)
    prepack(model)
    assert torch.equal(weight_of(up), before.weight)
    num_rows = prepacked_linear.MAX_MULTIPLICATIONS // up.weight.numel()
    for rows, operator in ((num_rows, torch.ops.aten.mm), (num_rows + 1, torch.ops.mkldnn._linear_pointwise)):
        given = torch.randn(1, rows, 128)
        with torch.no_grad(), Operators() as called:
            product = up(given)
        assert (torch.ops.aten.addmm if bias and operator is torch.ops.aten.mm else operator) in called.packets
        assert torch.allclose(product, before(given), atol=1e-5)
    assert up(torch.randn(1, 0, 128)).shape == (1, 0, 256)


def test_small_experts_stay_with_transformers() -> None:
    model = random_model("qwen3_moe", **EXPERTS)
    prepack_experts(model)
    assert all(weight.numel() for weight in model.parameters())
    assert model.config._experts_implementation != prepacked_experts.EXPERTS


def test_another_type_stays_as_it_is() -> None:
    model = random_model("llama", hidden_size=512, intermediate_size=512).bfloat16()
    prepack(model)
    assert all(weight.numel() for weight in model.parameters())


def test_a_block_has_the_choices_of_single_tokens() -> None:
    model = random_model("llama", hidden_size=512, intermediate_size=2048, vocab_size=4096)
    target = make_target(model, TAPS, 2)
    prompt = torch.randint(4096, (24,), generator=torch.Generator().manual_seed(0)).tolist()
    block = target.verify([Segment(slot=0, token_ids=prompt, num_logits=24)], with_taps=False).logits
    single = [
        target.verify([Segment(slot=1, token_ids=[token], num_logits=1)], with_taps=False).logits[0] for token in prompt
    ]
    assert torch.equal(block.argmax(-1), torch.stack(single).argmax(-1))
