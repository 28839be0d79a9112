# SPDX-License-Identifier: Apache-2.0
"""How a target is cut for ranks: what divides, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.ranks.sharding import GPT_OSS_PLAN, sharding
from tests.paths import FIXTURES


def write_config(directory: Path, **facts: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(facts))
    return directory


@pytest.mark.parametrize(("name", "facts"), [("tiny-gpt-oss", (8, 8, GPT_OSS_PLAN)), ("tiny-qwen3", (4, 1, None))])
def test_gpt_oss_is_sharded_to_the_last_head_and_expert_and_others_by_their_plan(name: str, facts: Any) -> None:
    config = sharding(FIXTURES / name, facts[0])
    assert (config.tp_size, config.ep_size, config.tp_plan) == facts


@pytest.mark.parametrize(
    ("facts", "named", "most"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 16, "num_local_experts": 8}, "num_attention_heads", 4),
        ({"num_attention_heads": 16, "num_key_value_heads": 16, "num_local_experts": 6}, "num_local_experts", 2),
        ({"num_attention_heads": 15, "num_key_value_heads": 5, "num_local_experts": 8}, "num_attention_heads", 1),
    ],
)
def test_the_part_that_does_not_divide_is_named(tmp_path: Path, facts: dict[str, int], named: str, most: int) -> None:
    directory = write_config(tmp_path / "target", model_type="gpt_oss", **facts)
    with pytest.raises(CheckpointError, match=f"{named}: expected a multiple of the number of ranks, 8") as caught:
        sharding(directory, 8)
    assert caught.value.hint.endswith(f"--tp {most}")


def test_a_multimodal_model_is_judged_by_its_text(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "num_attention_heads": 8, "num_key_value_heads": 4}
    directory = write_config(tmp_path / "t", model_type="gemma3", text_config=text)
    assert sharding(directory, 4).tp_size == 4
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        sharding(directory, 8)


def test_layers_with_heads_of_their_own_are_judged_one_by_one(tmp_path: Path) -> None:
    """Gemma 4's: transformers refuses to say a number for all layers."""
    text = {"model_type": "gemma4_text", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
    text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    directory = write_config(tmp_path / "t", model_type="gemma4", text_config=text)
    assert sharding(directory, 2).tp_size == 2
    with pytest.raises(CheckpointError, match=r"num_key_value_heads: expected a multiple of .* 4, found 2") as caught:
        sharding(directory, 4)
    assert caught.value.hint == "start 2 ranks with --tp 2"


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "target", model_type="gpt2")
    with pytest.raises(
        CheckpointError, match="expected one that transformers has a tensor-parallel plan for"
    ) as caught:
        sharding(directory, 2)
    assert "found gpt2" in caught.value.message
    assert caught.value.hint == "decode it on one rank: leave --tp out"
