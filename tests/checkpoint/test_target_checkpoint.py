# SPDX-License-Identifier: Apache-2.0
"""The target's facts and its input embedding, or the error that names what is wrong."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from dflash_trt.checkpoint.target_checkpoint import TargetSpec, read_target
from tests.checkpoint.samples import edit_config, edit_tensors, refusal

FACTS = ["hidden_size", "max_position_embeddings", "num_hidden_layers", "vocab_size"]


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


RENAMED: list[tuple[Callable[[dict[str, torch.Tensor]], object], str]] = [
    (lambda tensors: tensors.update(w=tensors.pop("model.embed_tokens.weight")),
     "found none"),
    (lambda tensors: tensors.update({"audio.embed_tokens.weight": torch.zeros(1)}),
     "found audio.embed_tokens.weight, model.embed_tokens.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), RENAMED)
def test_one_embedding_of_the_right_shape(
    change: Callable[[dict[str, torch.Tensor]], object], words: str, target_dir: Path
) -> None:
    edit_config(target_dir, vocab_size=97)
    message = refusal(lambda: read_target(target_dir))
    assert "tensor 'model.embed_tokens.weight': expected shape [97, 48], found [96, 48]" in message
    assert words in refusal(lambda: read_target(edit_tensors(target_dir, change)))


def test_what_is_no_target(draft_dir: Path, target_dir: Path) -> None:
    assert "is a DFlash draft, not a target" in refusal(lambda: read_target(draft_dir))
    edit_config(target_dir, num_hidden_layers=10**15)
    assert "num_hidden_layers: expected an integer from 1 to" in refusal(lambda: read_target(target_dir))
