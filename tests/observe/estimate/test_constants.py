# SPDX-License-Identifier: Apache-2.0
"""Constants: each with unit, range, source and date; units are SI; unknown hardware is refused with the list."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from transformers.models.muse_glimmer.configuration_muse_glimmer import MuseGlimmerTextConfig

from dflash_trt.deploy.deployment_file import load_deployment, shipped_deployments
from dflash_trt.deploy.gpus import known_gpus
from dflash_trt.deploy.published import published_targets
from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.constants import Rates, constants, rates
from dflash_trt.observe.estimate.experts import tables
from dflash_trt.observe.estimate.inputs import draft_shape, known_targets, target_shape
from dflash_trt.observe.estimate.target_config import read_target_shape

UNITS = {"bandwidth": "bytes/s", "flops": "flop/s", "seconds": "s", "efficiency": "ratio"}
# What a unit's numbers look like; a microsecond written as 3.5 or a bandwidth in GB/s falls out.
PLAUSIBLE = {"bytes/s": (1e10, 1e13), "flop/s": (1e14, 1e17), "s": (1e-6, 1e-2), "ratio": (0.03, 10)}


@pytest.mark.parametrize(("place", "constant"), list(constants()), ids=lambda value: str(value)[:60])
def test_every_constant_is_accounted_for(place: str, constant: object) -> None:
    entry = next(c for name, c in constants() if name == place)
    assert entry.low <= entry.value <= entry.high
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry.date)
    assert entry.source
    for word, unit in UNITS.items():
        if place.rpartition(".")[2].endswith(word):
            assert entry.unit == unit
    low, high = PLAUSIBLE.get(entry.unit, (0, float("inf")))
    assert all(low <= value <= high or value == 0 for value in (entry.value, entry.low, entry.high))


@pytest.mark.parametrize("gpu", sorted(known_gpus()))
def test_every_deployable_gpu_has_rates(gpu: str) -> None:
    assert rates(gpu, "trtllm").read_rate < rates(gpu, "trtllm").hbm_bandwidth


def test_rates_are_all_of_the_file_and_nothing_else() -> None:
    for gpu in constants().gpus:
        for runtime in constants().runtimes:
            assert set(constants().used(gpu, runtime)) == set(Rates.__struct_fields__)


def test_ends_of_ranges() -> None:
    name = "bandwidth_efficiency"
    constant = constants().kernels[name]
    assert rates("b300", "trtllm", {name: "low"}).bandwidth_efficiency == constant.low
    assert rates("b300", "trtllm", {name: "high"}).bandwidth_efficiency == constant.high


@pytest.mark.parametrize(
    ("gpu", "runtime", "words"),
    [
        ("b30", "trtllm", "expected a GPU whose rates are known (a800, b200, b300"),
        ("b300", "trt", "expected a runtime"),
    ],
)
def test_unknown_hardware_is_refused_with_the_list(gpu: str, runtime: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rates(gpu, runtime)
    assert words in caught.value.message
    assert "(nearest " in caught.value.message


def test_unknown_models_are_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"expected a target whose layers are known .*openai/gpt-oss-120b"):
        target_shape("openai/gpt-oss-121b")
    with pytest.raises(ConfigError, match=r"expected a draft whose facts are published .*z-lab/gpt-oss-120b-DFlash"):
        draft_shape("z-lab/nothing")


def test_every_shipped_deployment_has_a_target_whose_layers_are_known() -> None:
    deployed = {load_deployment(file).target for file in shipped_deployments().values()}
    assert known_targets().keys() >= {*published_targets(), *deployed}


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

    Of Muse's 29.6 the vision tower has 1.8, of GLM's 321.3 its own 0.5 and the MTP layer 7.5.
    """
    target = target_shape(name)
    heads = 1 if name == "Qwen/Qwen3.5-4B" or name.startswith("google/") else 2
    experts = target.num_expert_layers * target.num_experts * target.expert_params
    assert (target.dense_params + experts + heads * target.head_params) / 1e9 == pytest.approx(total, rel=0.01)
    assert (target.active_params + heads * target.head_params) / 1e9 == pytest.approx(active, rel=0.15)


def test_an_index_keeps_keys_and_spares_reads() -> None:
    """vLLM on four GPUs keeps 43,723 bytes of GLM-5.3-Flash a token, states shared by 1152 (LMCache #5042)."""
    cache = target_shape("zai-org/GLM-5.3-Flash").cache
    assert cache.bytes(1152, fp8=False, num_ranks=4) / 1152 == pytest.approx(43_723, rel=0.01)
    assert cache.row_numbers(2048) == cache.row_numbers(2048, is_read=True)
    assert cache.row_numbers(10_000, is_read=True) == 11 * (2048 * 512 + 10_000 * 32)
    assert cache.rows(10_000) == 11 * 2048


def test_muse_glimmer_is_as_transformers_has_it(tmp_path: Path) -> None:
    """Muse's config.json was not read: the class's defaults are those of the released checkpoint."""
    (tmp_path / "config.json").write_text(json.dumps(MuseGlimmerTextConfig().to_dict()))
    name = "meta-models/Muse-Glimmer-30B"
    assert msgspec.structs.replace(read_target_shape(tmp_path), target=name) == target_shape(name)


def test_draft_sizes() -> None:
    """784.8 M parameters, of which fc 41.5 M."""
    draft = draft_shape("z-lab/gpt-oss-120b-DFlash")
    (fc,), (layers,) = draft.gemms["tap projection"], draft.gemms["layers"]
    assert fc.params == pytest.approx(41.5e6, rel=0.01)
    assert layers.params + fc.params == pytest.approx(784.8e6, rel=0.001)


def test_tables_are_whole() -> None:
    for kernel in tables().kernels:
        assert kernel.gpu in constants().gpus
        tokens = [n for n, _ in kernel.microseconds]
        assert tokens == sorted(set(tokens))
        assert all(time > 1 for _, time in kernel.microseconds)
    assert msgspec.json.encode(tables())
