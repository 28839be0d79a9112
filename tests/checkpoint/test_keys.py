# SPDX-License-Identifier: Apache-2.0
"""No key of config.json is dropped that might touch the computation: it is computed, listed, or refused by name."""

from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from tests.checkpoint.samples import edit_config, refusal

TOP = [
    ("rope_interleave", True), ("partial_rotary", 0.5), ("is_neox", False), ("causal", True), ("bidirectional_head", 1),
    ("anchor_first", True), ("row_zero_predicts_next", True), ("shift_label", True), ("norm_before_fc", True),
    ("zero_centered_rmsnorm", True), ("attention_gate", "per-head"), ("query_scale", 0.1), ("swa_window_size", 8),
    ("num_heads", 4), ("mlp_bias", True), ("attn_logit_softcapping", 50.0), ("logit_scale", 0.5),
    ("use_qk_norm", False), ("attention_mode", "mla"), ("embedding_multiplier", 12.0), ("attention_value_scale", 0.6),
    ("projector_type", 2), ("dflash_query_causal", True),
]  # fmt: skip
INERT = {
    "shift_label": False, "norm_before_fc": False, "mlp_bias": False, "logit_scale": 1, "use_qk_norm": True,
    "attention_mode": "gqa", "projector_type": "dflash", "max_window_layers": 3, "norm_topk_prob": True,
    "confidence_head_alpha": 1.0, "selector_loss_alpha": 1.0, "num_anchors": 512, "attention_dropout": 0.1,
    "router_aux_loss_coef": 0.9, "dpace_alpha": 0.5, "loss_decay_gamma": 4.0, "moe_router_logit_softcapping": 3.0,
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), TOP)
def test_a_name_that_speaks_of_the_computation(key: str, value: object, draft_dir: Path) -> None:
    assert f"config.json: {key}: expected" in refusal(lambda: read_draft(edit_config(draft_dir, **{key: value})))
    edit_config(draft_dir, **{key: None, f"dflash_config__{key}": value})
    if key not in ("causal", "swa_window_size", "attention_value_scale"):  # these stand there
        assert f"config.json: dflash_config.{key}: expected" in refusal(lambda: read_draft(draft_dir))


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


def test_what_changes_nothing_passes(draft_dir: Path) -> None:
    expected = read_draft(draft_dir).spec
    section = {f"dflash_config__{key}": value for key, value in INERT.items()}
    assert read_draft(edit_config(draft_dir, **INERT, **section)).spec == expected


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
