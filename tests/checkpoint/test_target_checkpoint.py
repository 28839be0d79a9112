# SPDX-License-Identifier: Apache-2.0
"""The target's facts, and whether a draft fits them."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import TargetSpec, check_pair, read_target
from tests.checkpoint.samples import edit_config, edit_tensors, refusal, write_target
from tests.paths import FIXTURES

FACTS = ["hidden_size", "max_position_embeddings", "num_hidden_layers", "vocab_size"]


@pytest.mark.parametrize("name", ["tiny-gpt-oss", "tiny-qwen3"])
def test_fixture_pairs_fit(name: str) -> None:
    target = read_target(FIXTURES / name).spec
    check_pair(read_draft(FIXTURES / f"{name}-dflash").spec, target, draft_name="d", target_name="t")


def test_facts(target_dir: Path) -> None:
    assert read_target(target_dir).spec == TargetSpec(
        model_type="gpt_oss", hidden_size=48, num_hidden_layers=6, vocab_size=96, max_position_embeddings=8192
    )


def test_multimodal_facts_stand_in_text_config(target_dir: Path) -> None:
    text = read_target(target_dir).spec
    facts = {name: getattr(text, name) for name in FACTS}
    edit_config(target_dir, *FACTS, model_type="gemma3", text_config=facts)
    assert read_target(target_dir).spec == msgspec.structs.replace(text, model_type="gemma3")


def test_missing_key_in_text_config(target_dir: Path) -> None:
    edit_config(target_dir, text_config={"hidden_size": 48})
    message = refusal(lambda: read_target(target_dir))
    assert "config.json: missing key text_config.num_hidden_layers: expected an integer from 1" in message


@pytest.mark.parametrize("key", ["model_type", *FACTS])
def test_missing_key(key: str, target_dir: Path) -> None:
    message = refusal(lambda: read_target(edit_config(target_dir, key)))
    assert message.startswith(f"{target_dir / 'config.json'}: missing key {key}: expected")


def test_embedding_of_another_shape(target_dir: Path) -> None:
    message = refusal(lambda: read_target(edit_config(target_dir, vocab_size=97)))
    assert "tensor 'model.embed_tokens.weight': expected shape [97, 48], found [96, 48]" in message


def test_no_embedding(target_dir: Path) -> None:
    edit_tensors(target_dir, lambda tensors: tensors.update(w=tensors.pop("model.embed_tokens.weight")))
    message = refusal(lambda: read_target(target_dir))
    assert "expected one tensor named *embed_tokens.weight, found none" in message


def test_two_embeddings(target_dir: Path) -> None:
    edit_tensors(target_dir, lambda tensors: tensors.update({"audio.embed_tokens.weight": torch.zeros(1)}))
    message = refusal(lambda: read_target(target_dir))
    assert "found audio.embed_tokens.weight, model.embed_tokens.weight" in message


@pytest.mark.parametrize(
    ("target_facts", "words"),
    [
        ({"hidden_size": 64}, "hidden_size: expected 64 (target), found 48 (draft)"),
        ({"vocab_size": 100}, "vocab_size: expected 100 (target), found 96 (draft)"),
        ({"num_hidden_layers": 8}, "num_target_layers: expected 8 (target), found 6 (draft)"),
        ({"model_type": "qwen3"}, "model_type: expected qwen3 (target), found gpt_oss (draft)"),
    ],
)
def test_swapped_target(target_facts: dict[str, object], words: str, draft_dir: Path, tmp_path: Path) -> None:
    target = read_target(write_target(tmp_path / "other", **target_facts)).spec
    message = refusal(lambda: check_pair(read_draft(draft_dir).spec, target, draft_name="DRAFT", target_name="TARGET"))
    assert f"DRAFT does not fit target TARGET: {words}" in message
    assert "hint: give --target the model that this draft was trained for" in message


def test_tap_out_of_range(draft_dir: Path, tmp_path: Path) -> None:
    """Where the draft does not say how many layers its target has, its taps do."""
    draft = read_draft(edit_config(draft_dir, "num_target_layers")).spec
    target = read_target(write_target(tmp_path / "other", num_hidden_layers=3)).spec
    message = refusal(lambda: check_pair(draft, target, draft_name="DRAFT", target_name="TARGET"))
    assert "target_layer_ids: expected layers 0 to 2 (target), found [1, 2, 3] (draft)" in message


def test_the_last_layer_is_in_range(draft_dir: Path, tmp_path: Path) -> None:
    draft = read_draft(edit_config(draft_dir, "num_target_layers")).spec
    target = read_target(write_target(tmp_path / "other", num_hidden_layers=4)).spec
    check_pair(draft, target, draft_name="DRAFT", target_name="TARGET")


def test_a_draft_exported_as_qwen3_fits_a_gpt_oss_target(draft_dir: Path, target_dir: Path) -> None:
    draft = read_draft(edit_config(draft_dir, model_type="qwen3")).spec
    check_pair(draft, read_target(target_dir).spec, draft_name="DRAFT", target_name="TARGET")


def test_fixtures_swapped() -> None:
    """Both fixture targets have the same sizes: only the model type tells them apart."""
    draft = read_draft(FIXTURES / "tiny-gpt-oss-dflash").spec
    target = read_target(FIXTURES / "tiny-qwen3").spec
    message = refusal(lambda: check_pair(draft, target, draft_name="DRAFT", target_name="TARGET"))
    assert "model_type: expected qwen3 (target), found gpt_oss (draft)" in message


def test_a_draft_is_no_target(draft_dir: Path) -> None:
    assert "expected a target, found a DFlash draft" in refusal(lambda: read_target(draft_dir))


def test_absurd_facts_are_refused_before_they_are_used(target_dir: Path) -> None:
    config = json.loads((target_dir / "config.json").read_text()) | {"num_hidden_layers": 10**15}
    (target_dir / "config.json").write_text(json.dumps(config))
    assert "num_hidden_layers: expected an integer from 1 to" in refusal(lambda: read_target(target_dir))
