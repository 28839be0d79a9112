# SPDX-License-Identifier: Apache-2.0
"""Shapes of targets from config.json: against transformers' own models, and by hand from published ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError
from dflash_trt.observe.estimate.step import StepLoad
from dflash_trt.observe.estimate.target_config import read_target_shape, shape_of
from tests.observe.estimate.systems import CONFIGS, HYBRID, LATENT, model_of, target_of
from tests.runtime.targets.families import FAMILIES, write_family

QUICK = ("qwen3-next", "deepseek-v3")
NO_WEIGHTS = [
    "vis",
    "mm_",
    "multi_modal",
    "projector",
    "embed_tokens",
    "lm_head",
    ".gate.weight",
    "router",
    "shared_expert_gate",
    "_bias",
]
"""Names in the vision part, the vocabulary, and what picks experts: not among `dense_params`."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in FAMILIES])
def test_parameters_are_those_of_the_model(tmp_path: Path, name: str) -> None:
    """Matrices of attention, delta nets, dense and shared MLPs, and of experts, as transformers makes them."""
    model: nn.Module = write_family(tmp_path, name)
    shape = read_target_shape(tmp_path)
    sizes = {key: p.numel() for key, p in model.named_parameters() if not any(word in key for word in NO_WEIGHTS)}
    matrices = {key: size for key, size in sizes.items() if model.get_parameter(key).dim() > 1 and "conv1d" not in key}
    experts = sum(size for key, size in matrices.items() if ".experts." in key)
    assert shape.num_expert_layers * shape.num_experts * shape.expert_params == experts
    assert shape.dense_params == sum(matrices.values()) - experts


def test_deepseek_v3_by_hand() -> None:
    """671 B parameters, 37 B of them active; a token's cache is 576 numbers in each of 61 layers, on every rank."""
    target, model = target_of(LATENT), model_of(LATENT)
    total = target.dense_params + target.num_expert_layers * 256 * target.expert_params + 2 * target.head_params
    assert total == pytest.approx(671e9, rel=0.002)
    assert target.active_params + target.head_params == pytest.approx(37e9, rel=0.02)
    layer = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert (target.attention_params, target.replicated_attention_params) == (61 * layer, 61 * 7168 * (1536 + 576))
    assert target.weight_bytes == pytest.approx(671e9 + target.head_params * 2, rel=0.002)  # FP8, vocabulary BF16
    terms = {term.name: term for term in model.price("none", StepLoad(batch=4, num_draft_tokens=0, context=1000)).terms}
    assert terms["attention, KV cache"].bytes == 4 * 1000 * 576 * 61 * 2
    assert terms["attention projections"].bytes == 61 * layer / 8
    touched = model.touched_experts(4)
    assert terms["experts"].bytes == pytest.approx(58 * touched * target.expert_params / 8)
    assert terms["latent projections"].bytes == 61 * 7168 * (1536 + 576)  # whole on each of eight ranks


def test_absorbed_decoding_by_hand() -> None:
    """A head reads 576 numbers of a row for its score and 512 for its value: 2176 flops; a prompt's 640."""
    target = target_of(LATENT)
    assert target.attention_flops(3, 10, 8, is_prompt=False) == 3 * 10 * 16 * 2 * (576 + 512)
    assert target.attention_flops(3, 10, 8, is_prompt=True) == 3 * 10 * 16 * 2 * (192 + 128)


def test_qwen3_next_by_hand() -> None:
    """80 B parameters, 3 B active; 36 states that do not grow, and rows in twelve layers."""
    target, model = target_of(HYBRID), model_of(HYBRID)
    total = target.dense_params + 48 * 512 * target.expert_params + 2 * target.head_params
    assert total == pytest.approx(80e9, rel=0.01)
    assert target.active_params + target.head_params == pytest.approx(3.6e9, rel=0.1)
    state = 36 * (4 * 128 * 128 * 4 + (2 * 2 + 4) * 128 * 3 * 2)  # of four heads, on one of eight ranks
    for context in (1000, 50_000):
        load = StepLoad(batch=4, num_draft_tokens=9, context=context)
        terms = {term.name: term for term in model.price("dflash", load).terms if term.part == "target"}
        assert terms["delta nets, state"].bytes == 4 * (1 + 10) * state  # read once, written behind ten tokens
        assert terms["attention, KV cache"].bytes == 4 * context * 12 * 2 * 1 * 256 * 2
    alone = model._delta_nets(StepLoad(batch=0, num_draft_tokens=0, context=0, prompt_tokens=1000), 1).seconds
    flops = 7 * 1000 * 36 * 32 * 128 * 128 / 8
    assert alone == pytest.approx(36 * model.rates.attention_seconds + flops / model.rates.compute_rate(16))


def test_layers_without_experts() -> None:
    assert target_of(LATENT).num_expert_layers == 58
    assert target_of(HYBRID, mlp_only_layers=[0, 5]).num_expert_layers == 46
    assert target_of(HYBRID, decoder_sparse_step=2).num_expert_layers == 24


def test_packed_experts() -> None:
    """Kimi K2.5 as published: INT4 experts in groups of 32, all else BF16."""
    weights = {"num_bits": 4, "group_size": 32}
    packed = {
        **{"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*self_attn.*"]},
        "config_groups": {"group_0": {"weights": weights}},
    }
    target = target_of(LATENT, quantization_config=packed)
    assert (target.expert_bits, target.weight_bits, target.head_bits) == (4.5, 16, 16)
    with pytest.raises(CheckpointError, match=r"ignore: expected one group of weights, .*self_attn left out"):
        target_of(LATENT, quantization_config=packed | {"ignore": ["lm_head"]})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (LATENT, {"v_head_dim": None}, "v_head_dim: expected an integer"),
        (LATENT, {"qk_rope_head_dim": None}, "qk_rope_head_dim: expected an integer"),
        (LATENT, {"index_head_dim": 128}, "others are not modelled"),
        (LATENT, {"moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
        (LATENT, {"quantization_config": {"quant_method": "awq"}}, "quant_method: expected one of mxfp4, fp8"),
        (HYBRID, {"linear_key_head_dim": None}, "linear_key_head_dim: expected an integer"),
        (HYBRID, {"full_attention_interval": None}, "layer_types: expected the kind of each layer"),
        (HYBRID, {"layer_types": ["mamba"] * 48}, "layer_types: expected layers of full, sliding or latent attention"),
        (HYBRID, {"hybrid_override_pattern": "M*M-"}, "others are not modelled"),
        (HYBRID, {"linear_attn_config": {"kda_layers": [1]}}, "others are not modelled"),
        (HYBRID, {"gating": "per-head"}, "gating: expected a model without it"),
        (HYBRID, {"moe_intermediate_size": None}, "moe_intermediate_size: expected an integer"),
    ],
)
def test_what_is_not_modelled_or_not_said_is_refused(name: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        shape_of(Facts(CONFIGS[name] | changes, Path("config.json")), name)
    assert words in caught.value.message
