# SPDX-License-Identifier: Apache-2.0
"""Directories as trainers leave them are read, and what is something else is named with who takes it."""

import json
from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from tests.checkpoint.dialect_samples import add_random
from tests.checkpoint.samples import edit_config, refusal, write_target
from tests.cli.commands import run


def test_what_training_goes_on_from_is_not_opened(draft_dir: Path) -> None:
    expected = read_draft(draft_dir).spec
    for name in (
        "optimizer.pt",
        "scheduler.pt",
        "training_state.pt",
        "rng_state_0.pth",
        "training_args.bin",
        "model.py",
    ):
        (draft_dir / name).write_bytes(b"neither a pickle nor a program")
    assert read_draft(draft_dir).spec == expected
    (draft_dir / "extra_embedding.pt").write_bytes(b"a tensor, for all that is known")
    assert "found extra_embedding.pt (pickle)" in refusal(lambda: read_draft(draft_dir))


def test_other_words_for_the_same(draft_dir: Path) -> None:
    expected = read_draft(draft_dir).spec
    assert read_draft(edit_config(draft_dir, architectures=["Qwen3DFlashDraftModel"])).spec == expected
    tokens = {"added_tokens": [{"id": expected.mask_token_id, "content": "<|MASK|>"}, {"content": "x"}, 3]}
    edit_config(draft_dir, "dflash_config__mask_token_id", dflash_config__mask_token="<|MASK|>")
    words = (
        'dflash_config.mask_token: expected mask_token_id besides, or the token in a tokenizer.json, found "<|MASK|>"'
    )
    assert words in refusal(lambda: read_draft(draft_dir))
    (draft_dir / "tokenizer.json").write_text(json.dumps(tokens))
    assert read_draft(draft_dir).spec == expected
    (draft_dir / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": "5", "content": "<|MASK|>"}]}))
    assert "mask_token_id: expected an integer" in refusal(lambda: read_draft(draft_dir))


def test_an_embedding_of_its_own(draft_dir: Path) -> None:
    add_random(draft_dir, {"embed_tokens.weight": (96, 48)})
    assert read_draft(draft_dir).spec.own_embedding


STRANGERS = [
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "found an EAGLE head (LlamaForCausalLMEagle3)", "eagle3"),
    (
        {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]},
        "found an EAGLE head",
        "method eagle3",
    ),
    ({"architectures": ["DeepSeekMTPModel"]}, "found an MTP head (DeepSeekMTPModel)", "method mtp"),
    ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "found an MTP head", "NEXTN"),
    ({"architectures": ["MedusaModel"]}, "found a Medusa head (MedusaModel)", "method medusa"),
]


@pytest.mark.parametrize(("facts", "words", "who"), STRANGERS)
def test_heads_of_other_methods(facts: dict[str, object], words: str, who: str, tmp_path: Path) -> None:
    directory = write_target(tmp_path / "head", **facts)
    for read in (read_draft, read_target):
        message = refusal(lambda: read(directory))  # noqa: B023
        assert words in message
        assert who in message


def test_a_target_as_draft(tmp_path: Path) -> None:
    message = refusal(lambda: read_draft(write_target(tmp_path / "target")))
    assert "config.json: expected a DFlash draft, found a target (GptOssForCausalLM)" in message
    assert "give it as --target" in message


def test_a_target_that_holds_its_drafter(tmp_path: Path) -> None:
    facts = {"architectures": ["DeepseekV4ForCausalLM"], "dspark_block_size": 5, "dspark_markov_rank": 256}
    shown = run("inspect", write_target(tmp_path / "target", **facts), "--json")
    assert shown.returncode == 0
    document = json.loads(shown.stdout)
    assert document["kind"] == "target"
    words = "a DSpark drafter within its own weights: vLLM 0.33 (method dspark"
    assert words in document["holds"]
    edit_config(tmp_path / "target", "max_position_embeddings")
    assert f"the target holds {words}" in run("inspect", tmp_path / "target").stderr
    assert f"found a target (DeepseekV4ForCausalLM) with {words}" in refusal(lambda: read_draft(tmp_path / "target"))


@pytest.mark.parametrize(
    ("file", "words"),
    [("draft.gguf", "draft.gguf: expected "), ("adapter_config.json", "found a LoRA adapter (adapter_config.json)")],
)
def test_directories_of_something_else(file: str, words: str, tmp_path: Path) -> None:
    (tmp_path / file).write_bytes(b"GGUF")
    shown = run("inspect", tmp_path)
    assert shown.returncode == 1
    assert words in shown.stderr


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "found fp8\nhint: vLLM and SGLang serve this draft"),
        ({"quant_method": "exl3", "bits": 4.0}, "found exl3\nhint: exllamav3 serves this draft"),
    ],
)  # fmt: skip
def test_weights_of_other_quantisers(section: dict[str, object], words: str, draft_dir: Path) -> None:
    edit_config(draft_dir, quantization_config=section)
    assert words in refusal(lambda: read_draft(draft_dir))
