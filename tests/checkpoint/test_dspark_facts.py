# SPDX-License-Identifier: Apache-2.0
"""DSpark drafts: what config.json and tensors say, in DeepSpec's layout and in the nested one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import MarkovHead
from tests.checkpoint.dialect_samples import add_random, write_dspark, write_speculators
from tests.checkpoint.samples import edit_config, edit_tensors, refusal
from tests.reference.synthetic import MARKOV_RANK, Markov, write_random_draft


@pytest.mark.parametrize(
    ("head", "facts", "num_tensors"),
    [
        ("none", None, 36),
        ("vanilla", MarkovHead(rank=MARKOV_RANK, confidence=True), 40),
        ("gated", MarkovHead(rank=MARKOV_RANK, is_gated=True, confidence=True), 42),
    ],
)
def test_facts_and_tensors(head: Markov, facts: MarkovHead | None, num_tensors: int, tmp_path: Path) -> None:
    draft = read_draft(write_random_draft(tmp_path, dialect="qwen3", dspark=head))
    assert draft.dialect.name == "dspark"
    assert (draft.spec.markov_head, draft.spec.sample_from_anchor) == (facts, True)
    assert draft.spec.num_draft_tokens == draft.spec.block_size
    assert not any(layer.causal for layer in draft.spec.layers)
    assert len(draft.weights) == len(draft.spec.tensor_shapes()) == num_tensors
    assert not any("markov" in name or "confidence" in name for name in draft.spec.linear_modules())


def test_keys_may_be_nested(tmp_path: Path) -> None:
    """SpecForge writes them with its own name of the architecture."""
    expected = read_draft(write_dspark(tmp_path)).spec
    config = json.loads((tmp_path / "config.json").read_text())
    moved = [key for key in config if "markov" in key or key in ("mask_token_id", "target_layer_ids")]
    section = {key: config[key] for key in moved} | {"projector_type": "dspark"}
    edit_config(tmp_path, *moved, architectures=["DSparkDraftModel"], dflash_config=section)
    assert read_draft(tmp_path).spec == expected


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sample_from_anchor": False}, "sample_from_anchor: expected true"),
        ({"markov_head_type": "rnn"}, "markov_head_type: expected vanilla or gated"),
        ({"markov_rank": -1}, "markov_rank: expected an integer from 0"),
        ({"markov_rank": 0}, "enable_confidence_head: expected false, or true with confidence_head_with_markov"),
        ({"confidence_head_with_markov": False}, "enable_confidence_head: expected false, or true with"),
        ({"markov_rank": 13}, "tensor 'markov_head.markov_w1.weight': expected shape [96, 13], found [96, 12]"),
        ({"logit_scale": 0.5}, "logit_scale: expected 1"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 7}, "layer_types: expected 3 times full_att"),
        ({"dflash_config": {"shift_label": True}}, "shift_label: expected only the keys block_size"),
        ({"dflash_config": {"markov_rank": 3}}, "markov_rank: expected the same value as in dflash_config.markov_rank"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    edit_config(write_dspark(tmp_path), **changed)
    assert message in refusal(lambda: read_draft(tmp_path))


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    edit_tensors(write_dspark(tmp_path), lambda tensors: tensors.pop("confidence_head.proj.bias"))
    assert "missing tensor 'confidence_head.proj.bias' [1] (1 of 42 missing)" in refusal(lambda: read_draft(tmp_path))


@pytest.mark.parametrize("from_anchor", [True, False])
def test_speculators_layout(from_anchor: bool, tmp_path: Path) -> None:
    """Whose blocks may begin to propose behind the anchor."""
    heads = {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": False}
    edit_config(
        write_speculators(tmp_path), speculators_model_type="dspark", sample_from_anchor=from_anchor, **heads
    )  # fmt: skip
    add_random(tmp_path, {f"markov_head.markov_{w}.weight": (96, 8) for w in ("w1", "w2")})
    spec = read_draft(tmp_path).spec
    assert (spec.markov_head, spec.sample_from_anchor) == (MarkovHead(rank=8), from_anchor)
    assert spec.num_draft_tokens == spec.block_size - 1 + from_anchor
    edit_config(tmp_path, "sample_from_anchor")
    assert "missing key sample_from_anchor: expected true or false" in refusal(lambda: read_draft(tmp_path))
