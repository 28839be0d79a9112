# SPDX-License-Identifier: Apache-2.0
"""Loading a target: damaged ones are refused, and memory and type are judged before."""

from __future__ import annotations

import json
import shutil
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3ForCausalLM
from transformers.quantizers import quantizer_mxfp4

from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.checkpoint.tokenizer import load_tokenizer
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.targets import huggingface
from dflash_trt.runtime.targets.huggingface import (
    check_memory,
    free_bytes,
    load_model,
    loaded_bytes,
    make_target,
    placement,
    stop_token_ids,
)
from dflash_trt.runtime.targets.runnable import NOT_RUN, target_dtype
from dflash_trt.runtime.targets.sequential_target import SequentialTarget
from dflash_trt.runtime.targets.target import Segment
from tests.checkpoint.samples import edit_config, edit_tensors, refusal
from tests.paths import FIXTURES


def stored_as(directory: Path, dtype: torch.dtype, names: str = "") -> Path:
    """The weights of the fixture, those with `names` in their names in another type."""
    tensors = load_file(TARGET / "model.safetensors")
    directory.mkdir()
    changed = {name: tensor.to(dtype) if names in name else tensor for name, tensor in tensors.items()}
    save_file(changed, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_holds_every_value(stored: torch.dtype, tmp_path: Path) -> None:
    """In FLOAT on a CPU; in the checkpoint's own type on a GPU, except for FP16, which FLOAT holds."""
    directory = stored_as(tmp_path / "target", stored)
    weights = read_weights(directory)
    on_gpu = torch.bfloat16 if stored == torch.bfloat16 else torch.float32
    assert target_dtype("auto", directory, weights) == torch.float32
    assert target_dtype("auto", directory, weights, "cuda") == on_gpu
    for device in ("cpu", "cuda"):
        assert target_dtype("float32", directory, weights, device) == torch.float32


@pytest.mark.parametrize("name", ["float16", "float32"])
def test_bfloat16_rounds_no_other_type(name: str, tmp_path: Path) -> None:
    directory = stored_as(tmp_path / "target", getattr(torch, name))
    message = refusal(lambda: target_dtype("bfloat16", directory, read_weights(directory)), CheckpointError)
    assert f"{directory}: dtype bfloat16: expected weights in bfloat16, found {name} (" in message
    assert "hint: decode it with --dtype float32" in message


def test_a_few_tensors_of_another_type(tmp_path: Path) -> None:
    """Norms in FLOAT stand in many BF16 checkpoints; one tensor in FP16 is no BF16 checkpoint's."""
    few = stored_as(tmp_path / "few", torch.float32, "norm")
    assert target_dtype("bfloat16", few, read_weights(few)) == torch.bfloat16
    one = stored_as(tmp_path / "one", torch.float16, "lm_head")
    message = refusal(lambda: target_dtype("bfloat16", one, read_weights(one)), CheckpointError)
    assert "found float16 (lm_head.weight)" in message


def test_half_the_memory_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = read_target(TARGET).spec, read_weights(TARGET)
    needed = huggingface.loaded_bytes(weights, torch.bfloat16)
    monkeypatch.setattr(huggingface, "free_bytes", lambda: needed)
    message = refusal(lambda: load_model(TARGET, spec, [0]), CheckpointError)
    assert "computed with as 32-bit numbers" in message
    assert "hint: --dtype bfloat16 halves them" in message
    load_model(TARGET, spec, [0], dtype="bfloat16")
    monkeypatch.setattr(huggingface, "free_bytes", lambda: needed - 1)
    message = refusal(lambda: load_model(TARGET, spec, [0], dtype="bfloat16"), CheckpointError)
    assert "computed with as 16-bit numbers" in message
    assert "--dtype" not in message


TARGET = FIXTURES / "tiny-qwen3"


def tensor(name: str, dtype: str, *shape: int) -> StoredTensor:
    return StoredTensor(name=name, dtype=dtype, shape=shape, file=Path("w"), offset=0, num_bytes=0)


def weights(*tensors: StoredTensor) -> dict[str, StoredTensor]:
    return {each.name: each for each in tensors}


def test_embeddings_that_are_the_head_are_laid_out_once_more() -> None:
    table, head = tensor("model.embed_tokens.weight", "BF16", 8, 4), tensor("lm_head.weight", "BF16", 8, 4)
    assert loaded_bytes(weights(table), torch.float32) == loaded_bytes(weights(table, head), torch.float32) == 4 * 64
    assert loaded_bytes(weights(table), torch.bfloat16) == 2 * 32


def test_packed_experts_are_unpacked() -> None:
    """gpt-oss: gate_up_proj_blocks U8 [E, 2I, H/32, 16], two codes a byte, and a scale for 32 of them."""
    blocks, scales = tensor("x.gate_up_proj_blocks", "U8", 2, 8, 3, 16), tensor("x.gate_up_proj_scales", "U8", 2, 8, 3)
    assert loaded_bytes(weights(blocks, scales), torch.float32) == 4 * (2 * 8 * 3 * 32)
    assert loaded_bytes(weights(scales), torch.float32) == 4 * (2 * 8 * 3)  # not a model's packed experts


def test_one_layers_experts_are_laid_out_beside_themselves() -> None:
    """Their first matrices: one after the other as checkpoints of Qwen, MiniMax and gpt-oss name them."""
    experts = [
        *(
            tensor(f"l.0.mlp.experts.{e}.{name}.weight", "BF16", 3, 4)
            for e in (0, 1)
            for name in ("gate_proj", "up_proj")
        ),
        tensor("l.0.mlp.experts.0.down_proj.weight", "BF16", 4, 3),
        *(tensor(f"l.1.moe.experts.0.{name}.weight", "BF16", 3, 4) for name in ("w1", "w2", "w3")),
        tensor("l.2.mlp.experts.gate_up_proj_blocks", "U8", 2, 3, 1, 5),
    ]
    values = 4 * 12 + 12 + 3 * 12 + 60
    assert loaded_bytes(weights(*experts), torch.float32) == 4 * (values + 60)
    assert loaded_bytes(weights(*experts[:-1]), torch.float32) == 4 * (values - 60 + 4 * 12)
    assert loaded_bytes(weights(*experts[5:-1]), torch.float32) == 4 * (3 * 12 + 2 * 12)
    assert loaded_bytes(weights(*experts), torch.bfloat16) == 2 * (values + 60)


def test_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "free_bytes", lambda: 1_500_000_000)
    large = weights(tensor("a", "BF16", 10**9))
    message = refusal(lambda: check_memory(Path("large"), large, torch.float32))
    assert "large: expected 4.0 GB of free memory for its weights" in message
    assert "found 1.5 GB" in message
    check_memory(Path("large"), large, torch.float32, num_ranks=4)


def two_gpus(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Each with so much free memory."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))


def test_gpus_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = loaded_bytes(read_weights(TARGET), torch.float32)
    two_gpus(monkeypatch, needed // 2 - 1)
    monkeypatch.setattr(huggingface, "fetch_weights", None)  # not even fetched
    message = refusal(lambda: load_model(TARGET, read_target(TARGET).spec, [0], device="cuda:1", dtype="float32"))
    assert "of free GPU memory for its weights as 32-bit numbers, found" in message
    assert "on 2 GPUs" in message
    assert "--dtype bfloat16 halves them" in message


def test_a_target_larger_than_one_gpu_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = read_weights(TARGET)
    needed = loaded_bytes(weights, torch.float32)
    for free, expected in ((needed, {}), (needed - 1, {"device_map": "auto"})):
        two_gpus(monkeypatch, free)
        assert placement(TARGET, weights, torch.float32, "cuda") == expected


def test_a_spread_target_stays_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here accelerate finds room on the CPU only."""
    two_gpus(monkeypatch, loaded_bytes(read_weights(TARGET), torch.float32) - 1)
    message = refusal(lambda: load_model(TARGET, read_target(TARGET).spec, [0], device="cuda", dtype="float32"))
    assert "expected room for all layers on 2 GPUs, found some left over for the CPU" in message


def test_a_spread_target_runs_with_transformers_own_caches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By accelerate's hooks, with layers in memory and on disk in the place of two GPUs.

    The hook of the model moves tensors to the first of them, so no tensor may say which rows of the last are wanted.
    """
    kept, forward = list[object](), Qwen3ForCausalLM.forward

    def noted(*args: Any, **inputs: Any) -> Any:
        kept.append(inputs.get("logits_to_keep"))
        return forward(*args, **inputs)

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", wraps(forward)(noted))
    spec = read_target(TARGET).spec
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(spec.num_hidden_layers)}
    spread = make_target(load_model(TARGET, spec, [0], device_map=places, offload_folder=str(tmp_path)), [0], 1)
    assert isinstance(spread, SequentialTarget)
    assert "one after the other, on 2 devices in turn" in caplog.text
    segment = Segment(slot=0, token_ids=[5, 6, 7], num_logits=3)
    found, expected = (
        target.verify([segment], with_taps=True)
        for target in (spread, make_target(load_model(TARGET, spec, [0]), [0], 1))
    )
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.taps, expected.taps, rtol=1e-4, atol=1e-4)
    assert slice(0, 3) in kept
    assert not any(isinstance(rows, torch.Tensor) for rows in kept)


def packed_experts(directory: Path) -> Path:
    """The trained gpt-oss with experts of random MXFP4 codes, as OpenAI's checkpoints have them."""
    shutil.copytree(FIXTURES / "tiny-gpt-oss", directory)
    edit_config(directory, quantization_config={"quant_method": "mxfp4"})
    random = torch.Generator().manual_seed(0)

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            shape = (experts, rows, columns // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=random)
            tensors[f"{name}_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8, generator=random)

    return edit_tensors(directory, pack)


def test_packed_experts_are_numbers_on_a_gpu_machine_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Triton, `kernels` and a GPU, transformers would keep their codes, for kernels that it fetches."""
    directory = packed_experts(tmp_path / "target")
    expected = load_model(directory, read_target(directory).spec, [0]).state_dict()
    validate = quantizer_mxfp4.Mxfp4HfQuantizer.validate_environment

    def with_gpu(*args: Any, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
            validate(*args, **options)

    monkeypatch.setattr(quantizer_mxfp4.Mxfp4HfQuantizer, "validate_environment", with_gpu)
    monkeypatch.setattr(quantizer_mxfp4, "get_current_accelerator", lambda: torch.device("cuda"))
    for name in ("is_triton_available", "is_kernels_available"):
        monkeypatch.setattr(quantizer_mxfp4, name, lambda *_: True)
    found = load_model(directory, read_target(directory).spec, [0]).state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["model.layers.0.mlp.experts.down_proj"].dtype == torch.float32


@pytest.mark.parametrize(("limit", "room"), [("max", None), ("1000000", 400_000), ("500000", 0)])
def test_a_containers_limit(limit: str, room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.stat").write_text("anon 600000\nfile 300000\n")
    monkeypatch.setattr(huggingface, "_own_cgroup", lambda: tmp_path)
    assert huggingface.cgroup_room() == room
    if room is not None:
        assert free_bytes() == room


TENSOR = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURES / "tiny-qwen3", tmp_path / "target")


def load(target: Path) -> PreTrainedModel:
    return load_model(target, read_target(target).spec, [0])


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (None, f"expected a tensor for {TENSOR}, found none"),
        (torch.zeros(3, 128), f"{TENSOR}: expected shape [384, 128] (config.json), found [3, 128]"),
    ],
)
def test_a_weight_that_is_missing_or_has_another_shape(tensor: torch.Tensor | None, words: str, target: Path) -> None:
    """transformers warns, and computes with random numbers."""
    edit_tensors(target, lambda tensors: tensors.pop(TENSOR) if tensor is None else tensors.update({TENSOR: tensor}))
    message = refusal(lambda: load(target), CheckpointError)
    assert f"{target}: {words}" in message
    assert "hint: download or copy the checkpoint again" in message


def test_a_damaged_generation_config(target: Path) -> None:
    """transformers takes the end-of-sequence token of config.json, which may be another."""
    file = target / "generation_config.json"
    file.write_text('{"eos_token')
    assert f"{file}: expected a JSON object" in refusal(lambda: load(target), CheckpointError)


@pytest.mark.parametrize(
    "facts",
    [
        *({"num_attention_heads": 0}, {"hidden_act": "no such"}, {"layer_types": ["full_attention"] * 3}),
        *({"head_dim": "wide"}, {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, {"model_type": "t5"}),
    ],
    ids=str,
)
def test_a_configuration_that_transformers_stumbles_over(facts: dict[str, object], target: Path) -> None:
    edit_config(target, **facts)
    message = refusal(lambda: make_target(load(target), [0], 1), CheckpointError)
    words = "expected a " if "rope_parameters" in facts else "expected a causal language model that transformers"
    assert message.startswith(f"{target}: {words}")


@pytest.mark.parametrize("own_code", [False, True])
def test_code_of_the_checkpoint_is_never_run_nor_advised(own_code: bool, target: Path) -> None:
    (target / "modeling_mine.py").write_text("raise SystemExit('ran')\n")
    auto_map = {"AutoConfig": "modeling_mine.Config", "AutoModelForCausalLM": "modeling_mine.Model"}
    edit_config(target, model_type="mine", **({"auto_map": auto_map} if own_code else {}))
    message = refusal(lambda: load(target), CheckpointError)
    assert f"{target / 'config.json'}: model_type: expected a model that transformers" in message
    assert 'found "mine"' in message
    assert ("its own code along, which is never run" in message) == own_code
    assert "trust_remote_code" not in message
    assert "hint: serve this target with TensorRT-LLM, vLLM or SGLang" in message


@pytest.mark.parametrize("value", NOT_RUN)
def test_what_transformers_does_not_run_is_named_with_who_does(
    value: str, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compressed_tensors(monkeypatch)
    key = "quant_method" if value in ("modelopt", "compressed-tensors") else "model_type"
    runtimes = "TensorRT-LLM, vLLM or SGLang" if value == "modelopt" else "vLLM or SGLang"
    edit_config(target, **({key: value} if key == "model_type" else {"quantization_config": {key: value}}))
    message = refusal(lambda: load(target), CheckpointError)
    assert f'{key}: expected {NOT_RUN[value]}, found "{value}"' in message
    assert f"hint: serve this target with {runtimes}: dflash-trt serve-config --list" in message


def without_compressed_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the package with which transformers reads such weights."""
    monkeypatch.setattr("dflash_trt.runtime.targets.runnable.find_spec", lambda _: None)


def test_a_quantised_language_model_inside_a_multimodal_one(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi K2.5 is published with INT4 experts, and its facts and quantisation in text_config."""
    without_compressed_tensors(monkeypatch)
    facts = json.loads((target / "config.json").read_text())
    text = facts | {"model_type": "kimi_k2", "quantization_config": {"quant_method": "compressed-tensors"}}
    edit_config(target, model_type="kimi_k25", text_config=text)
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
