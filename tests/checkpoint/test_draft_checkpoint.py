# SPDX-License-Identifier: Apache-2.0
"""The draft's facts: read, or refused with the file and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.rope import Rope, Yarn
from tests.checkpoint.samples import edit_config, refusal
from tests.paths import FIXTURES
from tests.reference.synthetic import write_random_draft

REQUIRED = {
    "architectures": "a list of strings",
    "attention_bias": "true or false",
    "block_size": "an integer from 2",
    "dflash_config": "an object",
    "dflash_config__mask_token_id": "an integer from 0",
    "dflash_config__target_layer_ids": "a list of integers >= 0",
    "head_dim": "an integer from 2",
    "hidden_act": "one of silu",
    "hidden_size": "an integer from 1",
    "intermediate_size": "an integer from 1",
    "max_position_embeddings": "an integer from 1",
    "model_type": "one of qwen3, gpt_oss",
    "num_attention_heads": "an integer from 1",
    "num_hidden_layers": "an integer from 1",
    "num_key_value_heads": "an integer from 1",
    "rms_norm_eps": "a number > 0",
    "rope_theta": "a number > 0",
    "vocab_size": "an integer from 1",
}


def spec_of(directory: Path) -> DraftSpec:
    return read_draft(directory).spec


def test_the_real_gpt_oss_layout() -> None:
    """tiny-gpt-oss-dflash has the exact keys and tensors of the published drafter: 15 L + 3 of them."""
    draft = read_draft(FIXTURES / "tiny-gpt-oss-dflash")
    spec = draft.spec
    assert len(draft.weights) == 15 * len(spec.layers) + 3
    assert isinstance(spec.rope.scaling, Yarn)
    assert (spec.model_type, spec.attention_bias, spec.rope.scaling.truncate) == ("gpt_oss", True, False)
    assert len(spec.layers) != len(spec.target_layer_ids)
    assert all(layer.sliding_window is None and not layer.causal for layer in spec.layers)


def test_the_real_qwen3_layout() -> None:
    draft = read_draft(FIXTURES / "tiny-qwen3-dflash")
    assert len(draft.weights) == 11 * len(draft.spec.layers) + 3
    assert (draft.spec.model_type, draft.spec.attention_bias) == ("qwen3", False)
    assert draft.spec.rope == Rope(theta=1_000_000, scaling=None)


def test_counted_facts(draft_dir: Path) -> None:
    spec = spec_of(draft_dir)
    assert (spec.block_size, spec.num_draft_tokens) == (6, 5)
    assert spec.target_hidden_size == 3 * 48
    assert spec.context_bytes_per_token(fp8=False) == 3 * 2 * (2 * 16) * 2  # L * (k, v) * G*D * BF16
    assert spec.context_bytes_per_token(fp8=True) == 3 * 2 * (2 * 16)
    assert spec.input_embedding_scale == 1


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key(key: str, draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, key)))
    assert message.startswith(f"{draft_dir / 'config.json'}: ")
    assert f"{key.removeprefix('dflash_config__')}: expected {REQUIRED[key]}" in message
    assert "missing key" in message


@pytest.mark.parametrize("key", [key for key in REQUIRED if not key.startswith("dflash_config__")])
def test_null_is_missing(key: str, draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, **{key: None})))
    assert f": expected {REQUIRED[key]}" in message
    assert "found null" in message


WRONG: list[tuple[str, object, str]] = [
    ("architectures", ["Qwen3ForCausalLM"], "['DFlashDraftModel'], found [\"Qwen3ForCausalLM\"]"),
    ("model_type", "llama", 'one of qwen3, gpt_oss, found "llama"'),
    ("hidden_act", "gelu", 'one of silu, found "gelu"'),
    ("num_hidden_layers", 3.0, "an integer from 1 to 1024, found 3.0"),
    ("num_hidden_layers", 10**9, "an integer from 1 to 1024, found 1000000000"),
    ("max_position_embeddings", 2**31 - 1, "an integer from 1 to 16777216"),
    ("num_key_value_heads", 3, "a divisor of num_attention_heads 4, found 3"),
    ("head_dim", 15, "an even number (rotary pairs), found 15"),
    ("block_size", 1, "an integer from 2 to 1024, found 1"),
    ("block_size", 2**31 - 1, "an integer from 2 to 1024, found 2147483647"),
    ("rms_norm_eps", "1e-5", 'a number > 0, found "1e-5"'),
    ("dflash_config__mask_token_id", 96, "a token id below vocab_size 96, found 96"),
    ("dflash_config__target_layer_ids", [1, 2, 1], "each layer once, found [1, 2, 1]"),
    (
        "dflash_config__target_layer_ids",
        [3, 1, 2],
        "layers in rising order, and fc.weight's columns in the same, found",
    ),
    ("dflash_config__target_layer_ids", [], "a list of integers >= 0, found []"),
    ("dflash_config__target_layer_ids", [-1, 2], "a list of integers >= 0, found [-1, 2]"),
    ("layer_types", ["full_attention"] * 2, "3 times full_attention or sliding_attention"),
    ("layer_types", ["full_attention"] * 2 + ["linear_attention"], "3 times full_attention"),
    ("num_target_layers", "6", 'an integer from 1 to 2147483647, found "6"'),
]


@pytest.mark.parametrize(("key", "value", "words"), WRONG)
def test_wrong_value(key: str, value: object, words: str, draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, **{key: value})))
    assert f"{draft_dir / 'config.json'}: {key.replace('__', '.')}: expected {words}" in message


@pytest.mark.parametrize("key", ["projector_type", "maks_token_id"])
def test_unknown_dflash_config_key(key: str, draft_dir: Path) -> None:
    """A descendant without a name and a slip of the pen alike: what is not understood is not ignored."""
    message = refusal(lambda: read_draft(edit_config(draft_dir, **{f"dflash_config__{key}": 2})))
    assert f"dflash_config.{key}: expected only the keys attention_sink_bias, block_size, causal" in message


@pytest.mark.parametrize("key", ["final_logit_softcapping", "output_multiplier"])
def test_what_becomes_of_logits(key: str, draft_dir: Path) -> None:
    """Gemma's: read, but not whatever stands there."""
    assert getattr(spec_of(edit_config(draft_dir, **{f"dflash_config__{key}": 30.0})), key) == 30
    message = refusal(lambda: read_draft(edit_config(draft_dir, **{f"dflash_config__{key}": -1})))
    assert f"dflash_config.{key}: expected a number > 0, found -1" in message


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids"])
def test_facts_at_the_top_level_or_in_dflash_config(key: str, draft_dir: Path) -> None:
    spec = spec_of(draft_dir)
    value = getattr(spec, key)
    value = list(value) if isinstance(value, tuple) else value
    edit_config(draft_dir, **{key: value, f"dflash_config__{key}": value})
    assert spec_of(draft_dir) == spec
    edit_config(draft_dir, f"dflash_config__{key}")
    assert spec_of(draft_dir) == spec
    edit_config(draft_dir, key, **{f"dflash_config__{key}": value})
    assert spec_of(draft_dir) == spec


@pytest.mark.parametrize(("key", "other"), [("block_size", 8), ("mask_token_id", 7), ("target_layer_ids", [0, 1, 2])])
def test_two_values_for_one_fact(key: str, other: object, draft_dir: Path) -> None:
    spec = spec_of(draft_dir)
    value = getattr(spec, key)
    edit_config(draft_dir, **{key: other, f"dflash_config__{key}": value})
    message = refusal(lambda: read_draft(draft_dir))
    assert f"config.json: {key}: expected the same value as in dflash_config.{key}, found {other}" in message


def test_gpt_oss_drafter_exported_as_qwen3(draft_dir: Path) -> None:
    """modelopt writes qwen3 whatever the target is; biases and YaRN are facts of their own."""
    spec = spec_of(draft_dir)
    renamed = spec_of(edit_config(draft_dir, model_type="qwen3"))
    assert renamed.model_type == "qwen3"
    assert (renamed.attention_bias, renamed.rope) == (True, spec.rope)
    assert renamed.tensor_shapes() == spec.tensor_shapes()


def test_embedding_scale(tmp_path: Path) -> None:
    draft = write_random_draft(tmp_path / "draft", dialect="qwen3")
    edit_config(draft, dflash_config__input_embedding_scale=48**0.5)
    assert spec_of(draft).input_embedding_scale == 48**0.5
    edit_config(draft, dflash_config__input_embedding_scale="sqrt")
    message = refusal(lambda: read_draft(draft))
    assert "dflash_config.input_embedding_scale: expected a number > 0" in message
