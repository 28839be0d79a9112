# SPDX-License-Identifier: Apache-2.0
"""Directories as trainers leave them are read, and what is something else is named with who takes it."""

import json
from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.dialect_samples import add_random
from tests.checkpoint.samples import edit_config, edit_tensors, refusal, write_target
from tests.cli.commands import run
from tests.paths import FIXTURES


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
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("FP8 in blocks", "vLLM and SGLang serve")),
        ({"quant_method": "exl3", "bits": 4.0}, ("weights of EXL3", "exllamav3 serves this draft")),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("weights of bitsandbytes", "vLLM serves this draft")),
        ({"quant_method": "torchao"}, ("weights of torchao", "vLLM serves this draft")),
        ({"quant_method": "gptq", "bits": 4}, ("weights of GPTQ", "vLLM and SGLang serve this draft")),
        ({"quant_method": "intel/auto-round"}, ("weights of AutoRound", "vLLM and SGLang serve this draft")),
        ({"quant_method": "mxfp4"}, ("weights of MXFP4", "vLLM and SGLang serve")),
        ({"quant_method": "mine"}, ("weights of mine", "its own quantiser names who serves this draft")),
        ({"quant_algo": "mxfp4"}, ("quant_algo: expected", "Model Optimizer's mxfp4 (MXFP4)")),
        ({"quant_algo": "MXFP8"}, ("Model Optimizer's MXFP8 (MXFP8)", "vLLM serves this draft")),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, ("(FP8 with a scale for each row)", "vLLM serves this draft")),
        ({"quantization": {"quant_algo": "fp8_pb_wo"}}, ("Model Optimizer's fp8_pb_wo (FP8 in blocks)",)),
        ({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, ("(INT8 with SmoothQuant)", "TensorRT-LLM serves this draft")),
        ({"quant_algo": "NEW"}, ("Model Optimizer's NEW (NEW)",)),
    ],
)  # fmt: skip
def test_weights_of_other_quantisers(section: dict[str, object], words: tuple[str, ...], draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, quantization_config=section)))
    for word in words:
        assert word in message
    assert "for dflash-trt give the checkpoint that it was quantised from" in message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layers.0.mlp.up_proj.qweight", "found GPTQ's or AWQ's qweight\nhint: vLLM and SGLang serve this draft"),
        ("layers.0.mlp.up_proj.weight.absmax", "found bitsandbytes' absmax\nhint: vLLM serves this draft"),
        ("layers.0.mlp.up_proj.trellis", "found EXL3's trellis\nhint: exllamav3 serves this draft"),
    ],
)
def test_tensors_of_other_quantisers(name: str, words: str, draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({name: torch.zeros(4, dtype=torch.int32)}))
    assert words in refusal(lambda: read_draft(draft_dir))


@pytest.mark.parametrize(
    ("recipe", "changed", "words"),
    [
        (
            "fp8",
            {"kv_cache_quant_algo": "FP8"},
            "no k_scale and v_scale tensors: the context cache was never calibrated",
        ),
        ("fp8", {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is NVFP4; only an FP8 context cache"),
        ("nvfp4-w4a16", {"quant_algo": "NVFP4"}, "no layer has an input_scale: activations were never calibrated"),
    ],
)
def test_scales_that_no_calibration_wrote(recipe: str, changed: dict[str, object], words: str, tmp_path: Path) -> None:
    quantize_checkpoint(read_draft(FIXTURES / "tiny-qwen3-dflash"), load_recipe(recipe), tmp_path / "q")
    file = tmp_path / "q" / "hf_quant_config.json"
    details = json.loads(file.read_text())
    details["quantization"] |= changed
    file.write_text(json.dumps(details))
    if "quant_algo" in changed:
        edit_config(tmp_path / "q", quantization_config__quant_algo=changed["quant_algo"])
    assert words in refusal(lambda: read_draft(tmp_path / "q"))


def test_scalars_with_an_axis(tmp_path: Path) -> None:
    """Some tools save a number as [1]."""
    for recipe in ("fp8+fp8-kv", "nvfp4"):
        draft = tmp_path / recipe
        quantize_checkpoint(read_draft(FIXTURES / "tiny-qwen3-dflash"), load_recipe(recipe), draft)
        expected = read_draft(draft)
        edit_tensors(draft, lambda t: t.update({n: v.reshape(1) for n, v in t.items() if v.shape == ()}))
        found = read_draft(draft)
        assert found.quantization == expected.quantization
        assert {n: t.shape for n, t in found.weights.items()} == {n: t.shape for n, t in expected.weights.items()}
