# SPDX-License-Identifier: Apache-2.0
"""Damaged targets: what transformers would replace with something of its own is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.targets.huggingface import load_model, make_target, stop_token_ids
from dflash_trt.runtime.targets.refusal import NOT_RUN
from tests.checkpoint.samples import refusal
from tests.paths import FIXTURES

TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / "tiny-qwen3", tmp_path / "target")


def load(target: Path) -> PreTrainedModel:
    return load_model(target, read_target(target).spec, [0])


def set_tensor(target: Path, tensor: torch.Tensor | None) -> None:
    file = target / "model.safetensors"
    tensors = load_file(file)
    del tensors[TENSOR]
    if tensor is not None:
        tensors[TENSOR] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (None, f"expected a tensor for {TENSOR}, found none"),
        (torch.zeros(3, 128), f"{TENSOR}: expected shape [384, 128] (config.json), found [3, 128]"),
    ],
)
def test_a_weight_that_is_missing_or_has_another_shape(tensor: torch.Tensor | None, words: str, target: Path) -> None:
    """transformers warns, and computes with random numbers."""
    set_tensor(target, tensor)
    message = refusal(lambda: load(target), CheckpointError)
    assert f"{target}: {words}" in message
    assert "hint: download or copy the checkpoint again" in message


def test_a_damaged_generation_config(target: Path) -> None:
    """transformers takes the end-of-sequence token of config.json, which may be another."""
    file = target / "generation_config.json"
    file.write_text('{"eos_token')
    assert f"{file}: expected a JSON object" in refusal(lambda: load(target), CheckpointError)


def edit(target: Path, **facts: object) -> None:
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


@pytest.mark.parametrize(
    "facts",
    [
        *({"num_attention_heads": 0}, {"hidden_act": "no such"}, {"layer_types": ["full_attention"] * 3}),
        *({"head_dim": "wide"}, {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, {"model_type": "t5"}),
    ],
    ids=str,
)
def test_a_configuration_that_transformers_stumbles_over(facts: dict[str, object], target: Path) -> None:
    edit(target, **facts)
    message = refusal(lambda: make_target(load(target), [0], 1), CheckpointError)
    words = "expected a " if "rope_parameters" in facts else "expected a causal language model that transformers"
    assert message.startswith(f"{target}: {words}")


@pytest.mark.parametrize("own_code", [False, True])
def test_code_of_the_checkpoint_is_never_run_nor_advised(own_code: bool, target: Path) -> None:
    (target / "modeling_mine.py").write_text("raise SystemExit('ran')\n")
    auto_map = {"AutoConfig": "modeling_mine.Config", "AutoModelForCausalLM": "modeling_mine.Model"}
    edit(target, model_type="mine", **({"auto_map": auto_map} if own_code else {}))
    message = refusal(lambda: load(target), CheckpointError)
    assert f"{target / 'config.json'}: model_type: expected a model that transformers" in message
    assert 'found "mine"' in message
    assert ("its own code along, which is never run" in message) == own_code
    assert "trust_remote_code" not in message
    assert "hint: serve this target with TensorRT-LLM, vLLM or SGLang" in message


@pytest.mark.parametrize("value", NOT_RUN)
def test_what_transformers_does_not_run_is_named_with_who_does(value: str, target: Path) -> None:
    key = "quant_method" if value in ("modelopt", "compressed-tensors") else "model_type"
    runtimes = "TensorRT-LLM, vLLM or SGLang" if value == "modelopt" else "vLLM or SGLang"
    edit(target, **({key: value} if key == "model_type" else {"quantization_config": {key: value}}))
    message = refusal(lambda: load(target), CheckpointError)
    assert f'{key}: expected {NOT_RUN[value]}, found "{value}"' in message
    assert f"hint: serve this target with {runtimes}: dflash-trt serve-config --list" in message


def test_a_quantised_language_model_inside_a_multimodal_one(target: Path) -> None:
    """Kimi K2.5 is published with INT4 experts, and its facts and quantisation in text_config."""
    facts = json.loads((target / "config.json").read_text())
    text = facts | {"model_type": "kimi_k2", "quantization_config": {"quant_method": "compressed-tensors"}}
    edit(target, model_type="kimi_k25", text_config=text)
    message = refusal(lambda: load(target), CheckpointError)
    assert "text_config.quantization_config.quant_method: expected weights that transformers reads" in message


@pytest.mark.parametrize(("eos", "expected"), [(5, {5}), ([0, 5], {0, 5}), (None, set()), ("no file", {0})])
def test_end_of_sequence_tokens(target: Path, eos: Any, expected: set[int]) -> None:
    (target / "generation_config.json").write_text(json.dumps({} if eos is None else {"eos_token_id": eos}))
    if eos == "no file":
        (target / "generation_config.json").unlink()
    assert stop_token_ids(load(target)) == expected


@pytest.mark.parametrize("eos", ["</s>", ["</s>"], True])
def test_end_of_sequence_tokens_that_are_none(target: Path, eos: Any) -> None:
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    message = refusal(lambda: stop_token_ids(load(target)), CheckpointError)
    assert "generation_config.json: eos_token_id: expected a token id or a list of them, found " in message


@pytest.mark.parametrize("content", [None, b"{", b"{}", b"\xff", b""])
def test_a_tokenizer_that_is_missing_or_damaged(target: Path, content: bytes | None) -> None:
    """With no file at all, transformers makes an empty tokenizer of the model's type."""
    for file in target.glob("tokenizer*" if content == b"" else "tokenizer.json"):
        file.unlink()
    if content:
        (target / "tokenizer.json").write_bytes(content)
    message = refusal(lambda: load_tokenizer(target), CheckpointError)
    assert f"{target}: expected tokenizer files that transformers " in message
    assert ("found none" if content == b"" else "hint: download or copy tokenizer.json") in message


def test_a_running_target_does_not_depend_on_its_files(target: Path) -> None:
    """Overwritten in place, mapped weights changed under a server; truncated, they were a SIGBUS."""
    model = load(target)
    running = make_target(model, [0], num_slots=1)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    file = target / "model.safetensors"
    with file.open("r+b") as weights:
        weights.write(bytes(file.stat().st_size))
    assert before
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    file.write_bytes(b"")
    assert all(bool(weight.isfinite().all()) for weight in model.parameters())
    del running
