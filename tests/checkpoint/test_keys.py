# SPDX-License-Identifier: Apache-2.0
"""Every key of config.json is computed, known to change nothing, or refused by name."""

import json
import shutil
from itertools import product
from pathlib import Path

import pytest

from dflash_trt.checkpoint.dialects.keys import ALLOWED
from dflash_trt.checkpoint.draft_checkpoint import read_draft, read_spec
from dflash_trt.checkpoint.facts import Facts
from tests.checkpoint.samples import edit_config, refusal
from tests.cli.commands import run_here
from tests.paths import FIXTURES

REFUSED = {
    "anchor_first": True, "attention_gate": "per-head", "attention_mode": "mla", "attention_value_scale": 0.6,
    "attn_logit_softcapping": 50.0, "bidirectional_head": 1, "causal": True, "clip_qkv": 8.0,
    "dflash_query_causal": True, "embedding_multiplier": 12.0, "is_neox": False, "kv_lora_rank": 512,
    "linear_num_value_heads": 4, "logit_scale": 0.5, "mlp_bias": True, "norm_before_fc": True, "num_diffusion_steps": 4,
    "num_heads": 4, "num_kv_shared_layers": 2, "num_refinement_steps": 2, "partial_rotary": 0.5, "position_offset": 1,
    "projector_type": 2, "qk_layernorm": True, "query_scale": 0.1, "residual_multiplier": 0.5, "rope_interleave": True,
    "row_zero_predicts_next": True, "shift_label": True, "swa_window_size": 8, "use_qk_norm": False,
    "zero_centered_rmsnorm": True,
}  # fmt: skip
PLAIN = {
    "attention_bias": False, "attention_mode": "gqa", "logit_scale": 1, "mlp_bias": False, "norm_before_fc": False,
    "norm_before_residual": False, "projector_type": "dflash", "shift_label": False, "use_aux_hidden_state": True,
    "use_qk_norm": True,
}  # fmt: skip
VALUES = (True, 7, 0.5, "text", [1, 2], {"a": 1})
CHOSEN_BY = {"architectures", "model_type", "quantization_config"}
"""Keys that other parts of the reader read."""


@pytest.mark.parametrize(("key", "value"), REFUSED.items())
def test_a_key_that_may_be_a_fact(key: str, value: object, draft_dir: Path) -> None:
    assert f"config.json: {key}: expected" in refusal(lambda: read_draft(edit_config(draft_dir, **{key: value})))
    edit_config(draft_dir, **{key: None, f"dflash_config__{key}": value})
    if key not in ("causal", "swa_window_size", "attention_value_scale"):  # these stand there
        assert f"config.json: dflash_config.{key}: expected" in refusal(lambda: read_draft(draft_dir))


def test_keys_that_change_nothing(draft_dir: Path) -> None:
    """The value does not matter. Graphs are made from spec and weights alone."""
    expected, file = read_draft(draft_dir), draft_dir / "config.json"
    config = json.loads(file.read_text())
    for key, value in product(sorted(ALLOWED - CHOSEN_BY), VALUES):
        section = {"dflash_config": config["dflash_config"] | {key: value}}
        for changed in ({key: value}, section):
            assert read_spec(Facts(config | changed, file), expected.weights) == expected.spec, changed


@pytest.mark.parametrize(("key", "value"), PLAIN.items())
def test_a_value_that_changes_nothing(key: str, value: object, draft_dir: Path) -> None:
    expected = read_draft(draft_dir).spec
    edit_config(draft_dir, **{f"dflash_config__{key}": value}, **({} if key == "attention_bias" else {key: value}))
    assert read_draft(draft_dir).spec == expected


def test_an_engine_of_all_allowed_keys_has_the_same_graphs(tmp_path: Path) -> None:
    """One file has every allowed key."""
    draft = tmp_path / "draft"
    shutil.copytree(FIXTURES / "tiny-qwen3-dflash", draft)
    config = json.loads((draft / "config.json").read_text())
    others = {key: 7 for key in ALLOWED - CHOSEN_BY if key not in config}
    (draft / "config.json").write_text(json.dumps(config | others))
    for name, directory in (("plain", FIXTURES / "tiny-qwen3-dflash"), ("all", draft)):
        run_here("build", directory, "--target", FIXTURES / "tiny-qwen3", "-o", tmp_path / name)
    for file in ("context.onnx", "draft.onnx", "model.safetensors"):
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "all" / file).read_bytes()


def test_a_slip_of_the_pen(draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, dflash_config__maks_token_id=2)))
    assert "dflash_config.maks_token_id: expected only keys that are computed or known to change nothing" in message
    assert "if nothing is computed from maks_token_id, remove it from config.json" in message


def test_a_key_within_rotary_sections(draft_dir: Path) -> None:
    """M-RoPE's axes agree where all is text."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
    edit_config(draft_dir, rope_parameters=rope, rope_scaling=None, rope_theta=1e6)
    read_draft(draft_dir)
    edit_config(draft_dir, rope_parameters=rope | {"interleaved": True})
    assert "rope_parameters.interleaved: expected only keys that" in refusal(lambda: read_draft(draft_dir))
    edit_config(draft_dir, rope_parameters=rope, rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert "rope_scaling.rope_type: expected one of" in refusal(lambda: read_draft(draft_dir))
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    edit_config(draft_dir, rope_scaling=yarn)
    assert "rope_scaling: expected what rope_parameters says, or null" in refusal(lambda: read_draft(draft_dir))


@pytest.mark.parametrize("place", ["", "dflash_config__"])
@pytest.mark.parametrize("key", ["query_zero_predicts_next", "sample_from_anchor"])
def test_the_first_row_may_propose(key: str, place: str, draft_dir: Path) -> None:
    spec = read_draft(edit_config(draft_dir, **{place + key: True})).spec
    assert (spec.sample_from_anchor, spec.num_draft_tokens) == (True, spec.block_size)
    assert not read_draft(edit_config(draft_dir, **{place + key: False})).spec.sample_from_anchor


def test_two_words_for_the_first_row_agree(draft_dir: Path) -> None:
    edit_config(draft_dir, sample_from_anchor=True, dflash_config__query_zero_predicts_next=False)
    words = "dflash_config.query_zero_predicts_next: expected what sample_from_anchor says, found false"
    assert words in refusal(lambda: read_draft(draft_dir))


@pytest.mark.parametrize("is_causal", [None, False])
def test_windows_may_be_switched_off(is_causal: bool | None, draft_dir: Path) -> None:
    """Not the causality of their layers' type: z-lab's dflash 0.1.0 on transformers 5.24."""
    sliding = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 64, "is_causal": is_causal}
    edit_config(draft_dir, **sliding, use_sliding_window=False)
    found = {(layer.sliding_window, layer.causal) for layer in read_draft(draft_dir).spec.layers}
    assert found == {(None, is_causal is None)}
    edit_config(draft_dir, use_sliding_window=True)
    assert {layer.sliding_window for layer in read_draft(draft_dir).spec.layers} == {64}
