# SPDX-License-Identifier: Apache-2.0
"""Constants have unit, range, source and date; targets' shapes are those of config.json.

Shapes are held against transformers' own models, and against published ones by hand.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from torch import nn
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.deploy.deployment_file import load_deployment, shipped_deployments
from dflash_trt.deploy.gpus import known_gpu, known_gpus
from dflash_trt.deploy.published import published_targets
from dflash_trt.deploy.read_target_shape import read_target_shape, shape_of
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.errors import CheckpointError, ConfigError
from dflash_trt.observe.estimate.constants import GPU_RATES, Rates, constants, rates
from dflash_trt.observe.estimate.inputs import target_shape
from dflash_trt.observe.estimate.kernel_times import expert_tables
from dflash_trt.observe.estimate.step_cost import StepLoad
from tests.observe.estimate.systems import B300, CONFIGS, HYBRID, LATENT, model_of, target_of
from tests.runtime.targets.families import FAMILIES, write_family
from tools.estimate_tables import draft_shape

QUICK = ("qwen3-next", "deepseek-v3")


def active_params(target: TargetShape) -> int:
    """Parameters that one token is multiplied with, without lm_head."""
    return target.dense_params + target.num_expert_layers * target.top_k * target.expert_params


NO_WEIGHTS = [
    "vis", "mm_", "multi_modal", "projector", "embed_tokens", "lm_head", ".gate.weight", "router", "shared_expert_gate",
    "_bias",
]  # fmt: skip
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
    assert active_params(target) + target.head_params == pytest.approx(37e9, rel=0.02)
    layer = 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168
    assert (target.attention_params, target.replicated_attention_params) == (61 * layer, 61 * 7168 * (1536 + 576))
    assert target.weight_bytes == pytest.approx(671e9 + target.head_params * 2, rel=0.002)  # FP8, vocabulary BF16
    terms = {term.name: term for term in model.price("none", StepLoad(batch=4, num_draft_tokens=0, context=1000)).terms}
    assert terms["attention, KV cache"].bytes == 4 * 1000 * 576 * 61 * 2
    assert terms["attention projections"].bytes == 61 * layer / 8
    touched = model.touched_experts(4)
    assert terms["experts"].bytes == pytest.approx(58 * touched * target.expert_params / 8)
    assert terms["latent projections"].bytes == 61 * 7168 * (1536 + 576)  # whole on each of eight ranks


def test_absorbed_decoding_and_experts() -> None:
    """A head reads 576 numbers of a row for its score and 512 for its value: 2176 flops; a prompt's 640."""
    target = target_of(LATENT)
    assert target.attention_flops(3, 10, 8, is_prompt=False) == 3 * 10 * 16 * 2 * (576 + 512)
    assert target.attention_flops(3, 10, 8, is_prompt=True) == 3 * 10 * 16 * 2 * (192 + 128)
    assert target_of(LATENT).num_expert_layers == 58
    assert target_of(HYBRID, mlp_only_layers=[0, 5]).num_expert_layers == 46
    assert target_of(HYBRID, decoder_sparse_step=2).num_expert_layers == 24
    # Kimi K2.5 as published: INT4 experts in groups of 32, all else BF16
    weights = {"num_bits": 4, "group_size": 32}
    packed = {
        **{"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*self_attn.*"]},
        "config_groups": {"group_0": {"weights": weights}},
    }
    target = target_of(LATENT, quantization_config=packed)
    assert (target.expert_bits, target.weight_bits, target.head_bits) == (4.5, 16, 16)
    with pytest.raises(CheckpointError, match=r"ignore: expected one group of weights, .*self_attn left out"):
        target_of(LATENT, quantization_config=packed | {"ignore": ["lm_head"]})


def test_qwen3_next_by_hand() -> None:
    """80 B parameters, 3 B active; 36 states that do not grow, and rows in twelve layers."""
    target, model = target_of(HYBRID), model_of(HYBRID)
    total = target.dense_params + 48 * 512 * target.expert_params + 2 * target.head_params
    assert total == pytest.approx(80e9, rel=0.01)
    assert active_params(target) + target.head_params == pytest.approx(3.6e9, rel=0.1)
    state = 36 * (4 * 128 * 128 * 4 + (2 * 2 + 4) * 128 * 3 * 2)  # four heads, on one of eight ranks
    for context in (1000, 50_000):
        load = StepLoad(batch=4, num_draft_tokens=9, context=context)
        terms = {term.name: term for term in model.price("dflash", load).terms if term.part == "target"}
        assert terms["delta nets, state"].bytes == 4 * (1 + 10) * state  # read once, written after ten tokens
        assert terms["attention, KV cache"].bytes == 4 * context * 12 * 2 * 1 * 256 * 2
    alone = model._delta_nets(StepLoad(batch=0, num_draft_tokens=0, context=0, prompt_tokens=1000), 1).seconds
    flops = 7 * 1000 * 36 * 32 * 128 * 128 / 8
    assert alone == pytest.approx(36 * model.rates.attention_seconds + flops / model.rates.compute_rate(16))


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


UNITS = {"bandwidth": "bytes/s", "flops": "flop/s", "seconds": "s", "efficiency": "ratio"}
# Plausible range of a unit's numbers; a microsecond written as 3.5 or a bandwidth in GB/s is outside.
PLAUSIBLE = {"bytes/s": (1e10, 1e13), "flop/s": (1e14, 1e17), "s": (1e-6, 1e-2), "ratio": (0.03, 10)}


def test_every_constant_is_accounted_for() -> None:
    for place, entry in constants():
        assert entry.low <= entry.value <= entry.high, place
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry.date), place
        assert entry.source, place
        for word, unit in UNITS.items():
            if place.rpartition(".")[2].endswith(word):
                assert entry.unit == unit, place
        low, high = PLAUSIBLE.get(entry.unit, (0, float("inf")))
        assert all(low <= value <= high or value == 0 for value in (entry.value, entry.low, entry.high)), place


@pytest.mark.parametrize("gpu", sorted(known_gpus()))
def test_every_deployable_gpu_has_rates(gpu: str) -> None:
    assert rates(known_gpu(gpu), "trtllm").read_rate < known_gpu(gpu).memory_bandwidth


def test_rates_and_tables_are_all_of_their_files() -> None:
    for runtime in constants().runtimes:
        assert {*constants().used(runtime), *GPU_RATES} == set(Rates.__struct_fields__)
    name = "bandwidth_efficiency"
    constant = constants().kernels[name]
    assert rates(B300, "trtllm", {name: "low"}).bandwidth_efficiency == constant.low
    assert rates(B300, "trtllm", {name: "high"}).bandwidth_efficiency == constant.high
    for kernel in expert_tables().kernels:
        assert kernel.gpu in known_gpus()
        tokens = [n for n, _ in kernel.microseconds]
        assert tokens == sorted(set(tokens))
        assert all(time > 1 for _, time in kernel.microseconds)
    assert msgspec.json.encode(expert_tables())


@pytest.mark.parametrize(
    ("gpu", "runtime", "words"),
    [
        ("b30", "trtllm", "expected a GPU (a100, a100-40gb, a800, b200, b300"),
        ("b300", "trt", "expected a runtime"),
    ],
)
def test_unknown_hardware_is_refused_with_the_list(gpu: str, runtime: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rates(known_gpu(gpu), runtime)
    assert words in caught.value.message
    assert "(nearest " in caught.value.message


def test_models_are_known_or_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"the layers of target .* are unknown .*openai/gpt-oss-120b"):
        target_shape("openai/gpt-oss-121b")
    with pytest.raises(ConfigError, match=r"the facts of draft .* are unknown .*z-lab/gpt-oss-120b-DFlash"):
        draft_shape("z-lab/nothing")
    deployed = {load_deployment(file).target for file in shipped_deployments().values()}
    assert published_targets().keys() >= deployed


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen/Qwen3.5-4B", 4.2, 4.2), ("Qwen/Qwen3.5-9B", 9.0, 9.0), ("Qwen/Qwen3.6-27B", 26.9, 26.9),
        ("Qwen/Qwen3.5-35B-A3B", 34.6, 3), ("Qwen/Qwen3.5-122B-A10B", 122, 10), ("Qwen/Qwen3-Coder-Next", 80, 3.5),
        ("google/gemma-4-31B-it", 30.7, 30.7), ("google/gemma-4-26B-A4B-it", 25.2, 3.8),
        ("openai/gpt-oss-120b", 116.8, 5.1), ("moonshotai/Kimi-K2.6", 1026, 32), ("Qwen/Qwen3.8-27B", 26.9, 26.9),
        ("meta-models/Muse-Glimmer-30B", 27.8, 27.8), ("zai-org/GLM-5.3-Flash", 313.2, 18),
    ],
)  # fmt: skip
def test_layers_add_up_to_the_published_number_of_parameters(name: str, total: float, active: float) -> None:
    """Billions; those of 4B and Gemma share embedding and lm_head, which others have twice.

    Muse's 29.6 include 1.8 of the vision tower; GLM's 321.3 include 0.5 of its own and 7.5 of the MTP layer.
    """
    target = target_shape(name)
    heads = 1 if name == "Qwen/Qwen3.5-4B" or name.startswith("google/") else 2
    experts = target.num_expert_layers * target.num_experts * target.expert_params
    assert (target.dense_params + experts + heads * target.head_params) / 1e9 == pytest.approx(total, rel=0.01)
    assert (active_params(target) + heads * target.head_params) / 1e9 == pytest.approx(active, rel=0.15)


def test_sizes() -> None:
    """vLLM on four GPUs keeps 43,723 bytes of GLM-5.3-Flash a token, states shared by 1152 (LMCache #5042)."""
    cache = target_shape("zai-org/GLM-5.3-Flash").cache
    assert cache.bytes(1152, fp8=False, num_ranks=4) / 1152 == pytest.approx(43_723, rel=0.01)
    assert cache.row_numbers(2048) == cache.row_numbers(2048, is_read=True)
    assert cache.row_numbers(10_000, is_read=True) == 11 * (2048 * 512 + 10_000 * 32)
    assert cache.rows(10_000) == 11 * 2048
    # 784.8 M parameters, of which fc 41.5 M
    draft = draft_shape("z-lab/gpt-oss-120b-DFlash")
    (fc,), (layers,) = draft.gemms["tap projection"], draft.gemms["layers"]
    assert fc.params == pytest.approx(41.5e6, rel=0.01)
    assert layers.params + fc.params == pytest.approx(784.8e6, rel=0.001)


def test_muse_glimmer_is_as_transformers_has_it(tmp_path: Path) -> None:
    """Muse's config.json was not read: the class's defaults are those of the released checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps(MuseGlimmerTextConfig().to_dict()))
    name = "meta-models/Muse-Glimmer-30B"
    read = read_target_shape(tmp_path)
    assert read.num_mtp_layers is None, "without weight files that is not known"
    assert msgspec.structs.replace(read, target=name, num_mtp_layers=0) == target_shape(name)
