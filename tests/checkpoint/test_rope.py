# SPDX-License-Identifier: Apache-2.0
"""Rotary facts in both spellings, and their frequencies against transformers."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.rope import Llama3, Rope, Yarn, read_rope, spell_rope
from tests.checkpoint.samples import edit_config, refusal

EPSILON = 2.0**-23  # transformers computes in float32; the scaling factor magnifies its rounding
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def rope_of(**config: object) -> Rope:
    return read_rope(Facts(config, Path("config.json")))


@pytest.mark.parametrize(
    ("head_dim", "theta", "changes"),
    [
        (64, 150_000.0, {}),  # gpt-oss-120b-DFlash
        (64, 150_000.0, {"truncate": True}),
        (128, 1_000_000.0, {"factor": 4.0, "original_max_position_embeddings": 32768, "truncate": True}),
        (128, 10_000.0, {"beta_fast": 64.0, "beta_slow": 2.0}),
        (16, 150_000.0, {"original_max_position_embeddings": 256}),  # the fixtures
        (64, 150_000.0, {"attention_factor": 1.5}),
        (64, 10_000.0, {"mscale": 1.0, "mscale_all_dim": 0.8}),
        (64, 150_000.0, {"original_max_position_embeddings": 1024}),  # factor is not max / original
        (4, 10.0, {"original_max_position_embeddings": 4, "truncate": True}),  # an empty correction range
    ],
)
def test_yarn_equals_transformers(head_dim: int, theta: float, changes: dict[str, Any]) -> None:
    scaling = YARN | changes
    config = GptOssConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters={**scaling, "rope_theta": theta}
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rope = rope_of(rope_theta=theta, rope_scaling=scaling)
    np.testing.assert_allclose(rope.inverse_frequencies(head_dim), expected.double(), rtol=EPSILON * scaling["factor"])
    assert math.isclose(rope.attention_factor, attention_factor, rel_tol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"factor": 32.0}, {"low_freq_factor": 2.0, "high_freq_factor": 8.0}])
def test_llama3_equals_transformers(changes: dict[str, Any]) -> None:
    scaling = LLAMA3 | changes
    config = LlamaConfig(
        head_dim=128, max_position_embeddings=131072, rope_parameters={**scaling, "rope_theta": 500_000.0}
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    rope = rope_of(rope_theta=500_000, rope_scaling=scaling)
    np.testing.assert_allclose(rope.inverse_frequencies(128), expected.double(), rtol=EPSILON * scaling["factor"])
    assert rope.attention_factor == attention_factor == 1


def test_plain_rope_is_the_definition() -> None:
    rope = rope_of(rope_theta=1_000_000)
    expected = [1_000_000 ** (-2 * i / 128) for i in range(64)]
    np.testing.assert_allclose(rope.inverse_frequencies(128), expected, rtol=1e-14)
    assert rope.attention_factor == 1


def test_both_spellings_are_the_same_facts(draft_dir: Path) -> None:
    rope = read_draft(draft_dir).spec.rope
    assert rope.attention_factor == pytest.approx(1.3466, abs=5e-5), "trap 5: 0.1 ln(32) + 1 on cos and sin"
    scaling = {**YARN, "original_max_position_embeddings": 256}
    edit_config(draft_dir, "rope_scaling", "rope_theta", rope_parameters={**scaling, "rope_theta": 150000})
    assert read_draft(draft_dir).spec.rope == rope
    older = {"type": "yarn"} | {key: value for key, value in YARN.items() if key != "rope_type"}
    assert rope_of(rope_theta=150_000, rope_scaling=older) == rope_of(rope_theta=150_000, rope_scaling=YARN)


def test_what_transformers_writes_is_understood(tmp_path: Path) -> None:
    Qwen3Config(rope_parameters={**LLAMA3, "rope_theta": 500_000.0}).save_pretrained(tmp_path)
    rope = read_rope(Facts.load(tmp_path / "config.json"))
    assert rope.theta == 500_000
    assert isinstance(rope.scaling, Llama3)


def test_defaults_of_the_format() -> None:
    short = {key: YARN[key] for key in ("rope_type", "factor", "original_max_position_embeddings")}
    scaling = rope_of(rope_theta=150_000, rope_scaling=short).scaling
    assert isinstance(scaling, Yarn)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.truncate) == (32, 1, True)
    parameters = {"rope_type": "default", "rope_theta": 10_000}
    assert rope_of(rope_parameters=parameters) == Rope(theta=10_000, scaling=None)
    assert rope_of(rope_theta=10_000, rope_scaling=None) == Rope(theta=10_000, scaling=None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "rope_theta: expected a number > 0"),
        ({"rope_theta": 1}, "rope_theta: expected a number > 1, found 1"),
        ({"rope_theta": 1e4, "rope_scaling": {"factor": 2}}, "rope_scaling.type: expected one of default, yarn"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type: expected one of"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "dynamic"}}, 'llama3, found "dynamic"'),
        ({"rope_theta": 1e4, "rope_scaling": "yarn"}, 'rope_scaling: expected an object, found "yarn"'),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_theta: expected a number > 0"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
         "rope_theta: expected the same value as in rope_parameters.rope_theta, found 10000.0"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 1.5},
         "partial_rotary_factor: expected a number > 0 and at most 1"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 2}},
         "rope_parameters.partial_rotary_factor: expected a number > 0 and at most 1"),
        ({"rope_theta": 1e4, "rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}},
         "rope_scaling.high_freq_factor: expected a number > low_freq_factor 1.0, found 1.0"),
        ({"rope_theta": 1e4, "rope_scaling": YARN | {"truncate": 0}}, "truncate: expected true or false, found 0"),
    ],
)  # fmt: skip
def test_refused(config: dict[str, object], words: str) -> None:
    assert words in refusal(lambda: rope_of(**config))


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_missing_key(scaling: dict[str, object], key: str) -> None:
    short = {name: value for name, value in scaling.items() if name != key}
    message = refusal(lambda: rope_of(rope_theta=1e4, rope_scaling=short))
    assert f"config.json: missing key rope_scaling.{key}: expected" in message


def test_a_part_of_the_head_turns() -> None:
    """Where a file says it in both places, both say the same."""
    default = {"rope_type": "default", "rope_theta": 1e4}
    assert rope_of(rope_theta=1e4, partial_rotary_factor=0.5).partial_rotary_factor == 0.5
    assert rope_of(rope_parameters=default | {"partial_rotary_factor": 0.25}).partial_rotary_factor == 0.25
    assert rope_of(rope_parameters=default, partial_rotary_factor=0.25).partial_rotary_factor == 0.25
    both = default | {"partial_rotary_factor": 0.5}
    words = "partial_rotary_factor: expected the same value as in rope_parameters.partial_rotary_factor, found 0.25"
    assert words in refusal(lambda: rope_of(rope_parameters=both, partial_rotary_factor=0.25))


@pytest.mark.parametrize("key", ["is_neox_style", "rope_is_neox_style"])
def test_pairs_may_lie_side_by_side(key: str) -> None:
    assert rope_of(rope_theta=1e4, **{key: False}).interleaved
    assert rope_of(rope_theta=1e4, **{key: True}) == rope_of(rope_theta=1e4)
    words = "rope_is_neox_style: expected the same value as is_neox_style, found true"
    assert words in refusal(lambda: rope_of(rope_theta=1e4, is_neox_style=False, rope_is_neox_style=True))
    spelled = spell_rope(rope_of(rope_theta=1e4, **{key: False}))
    assert rope_of(**spelled).interleaved
