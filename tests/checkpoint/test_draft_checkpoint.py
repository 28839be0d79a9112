# SPDX-License-Identifier: Apache-2.0
"""The draft's facts and tensors: read, each as config.json demands it, or refused with the file and the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.rope import Rope, Yarn
from tests.checkpoint.dialect_samples import MIXED
from tests.checkpoint.samples import edit_config, edit_tensors, refusal, shard
from tests.paths import FIXTURES
from tests.reference.synthetic import write_random_draft

V_BIAS = "layers.1.self_attn.v_proj.bias"


def test_missing_tensor(draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.pop(V_BIAS))
    message = refusal(lambda: read_draft(draft_dir))
    assert message.startswith(f"{draft_dir}: missing tensor '{V_BIAS}' [32]")
    assert "1 of 48 missing" in message


def test_lost_biases(draft_dir: Path) -> None:
    """What other converters drop without a word."""

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".bias")]:
            del tensors[name]

    assert "12 of 48 missing" in refusal(lambda: read_draft(edit_tensors(draft_dir, drop)))


def test_biases_that_the_facts_deny(draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, attention_bias=False)))
    assert "model.safetensors: expected the 36 tensors that config.json describes" in message
    assert "found tensor 'layers.0.self_attn.k_proj.bias' besides (12 that nothing would use)" in message


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "layers.3.mlp.up_proj.weight", "d2t"])
def test_extra_tensor(name: str, draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({name: torch.zeros(2)}))
    message = refusal(lambda: read_draft(draft_dir))
    assert f"found tensor '{name}' besides (1 that nothing would use)" in message


def test_extra_tensor_in_a_shard_is_named_with_its_file(draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({"zzz": torch.zeros(2)}))
    message = refusal(lambda: read_draft(shard(draft_dir)))
    assert message.startswith(f"{draft_dir}/model-0000")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("fc.weight", (48, 96), [48, 144]),  # two taps instead of three
        ("layers.0.self_attn.q_norm.weight", (64,), [16]),
        ("layers.2.mlp.down_proj.weight", (80, 48), [48, 80]),
        (V_BIAS, (32, 1), [32]),
        ("norm.weight", (), [48]),
    ],
)
def test_wrong_shape(name: str, shape: tuple[int, ...], expected: list[int], draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({name: torch.zeros(shape, dtype=torch.bfloat16)}))
    message = refusal(lambda: read_draft(draft_dir))
    assert f"model.safetensors: tensor '{name}': expected shape {expected}, found {list(shape)}" in message


@pytest.mark.parametrize(
    ("dtype", "found"), [(torch.int32, "I32"), (torch.float64, "F64"), (torch.float8_e5m2, "F8_E5M2")]
)
@pytest.mark.parametrize("name", ["layers.1.mlp.up_proj.weight", "norm.weight", V_BIAS])
def test_wrong_dtype(name: str, dtype: torch.dtype, found: str, draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    message = refusal(lambda: read_draft(draft_dir))
    assert f"tensor '{name}': expected " in message
    assert "BF16" in message
    assert message.endswith(f"found {found}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dialect", ["gpt_oss", "qwen3"])
def test_float_weights_are_read_as_they_are(dtype: torch.dtype, dialect: str, tmp_path: Path) -> None:
    draft = read_draft(write_random_draft(tmp_path / "draft", dialect=dialect, dtype=dtype))  # type: ignore[arg-type]
    expected = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype]
    assert {tensor.dtype for tensor in draft.weights.values()} == {expected}


def test_a_pickle_beside_the_weights(draft_dir: Path) -> None:
    """MiMo keeps a trained mask embedding there: without it the drafter would be another one."""
    (draft_dir / "mask_embedding.pt").write_bytes(b"\x80\x04.")
    message = refusal(lambda: read_draft(draft_dir))
    assert "expected all tensors in safetensors files, found mask_embedding.pt (pickle)" in message


def test_pickles_only(draft_dir: Path) -> None:
    (draft_dir / "model.safetensors").rename(draft_dir / "pytorch_model.bin")
    assert "found pickle weights (pytorch_model.bin)" in refusal(lambda: read_draft(draft_dir))


H, N, D, A, V = 48, 4, 16, 3, 96


@pytest.fixture
def spec(draft_dir: Path) -> DraftSpec:
    return read_draft(draft_dir).spec


@pytest.mark.parametrize(
    ("facts", "tensors"),
    [
        ({"tap_norms": True}, {f"aux_hidden_norms.{tap}.weight": (H,) for tap in range(A)}),
        ({"own_embedding": True}, {"embed_tokens.weight": (V, H)}),
        ({"mask_embedding": True}, {"mask_embedding": (H,)}),
        ({"draft_vocab_size": V}, {"lm_head.weight": (V, H)}),
        ({"draft_vocab_size": 20}, {"lm_head.weight": (20, H), "d2t": (20,)}),
        ({"attention_gate": "per_head"}, {f"layers.{i}.self_attn.g_proj.weight": (N, H) for i in range(3)}),
        ({"attention_gate": "per_element"}, {f"layers.{i}.self_attn.g_proj.weight": (N * D, H) for i in range(3)}),
        ({"biases": ("fc", "up_proj")}, {"fc.bias": (H,), **{f"layers.{i}.mlp.up_proj.bias": (80,) for i in range(3)}}),
        ({"value_scale": 0.5, "output_multiplier": 2.0, "context_input_layernorm": True}, {}),
    ],
)
def test_a_fact_demands_its_tensors(
    spec: DraftSpec, facts: dict[str, Any], tensors: dict[str, tuple[int, ...]]
) -> None:
    changed = msgspec.structs.replace(spec, **facts)
    added = dict(changed.tensor_shapes().items() - spec.tensor_shapes().items())
    assert added == tensors
    assert spec.tensor_shapes().items() <= changed.tensor_shapes().items()


def test_sinks_are_by_layer(spec: DraftSpec) -> None:
    layers = (msgspec.structs.replace(spec.layers[0], sinks=True), *spec.layers[1:])
    changed = msgspec.structs.replace(spec, layers=layers)
    assert dict(changed.tensor_shapes().items() - spec.tensor_shapes().items()) == {"layers.0.self_attn.sinks": (N,)}


def test_embedding_and_head_are_no_linear_layers(spec: DraftSpec) -> None:
    """Recipes say of all linear layers how they are quantised."""
    changed = msgspec.structs.replace(spec, own_embedding=True, draft_vocab_size=20)
    assert changed.linear_modules() == spec.linear_modules()


def test_json_says_only_what_is_unusual(spec: DraftSpec) -> None:
    """So that the manifest of a plain draft is what it was before."""
    assert not {"biases", "value_scale", "own_embedding", "draft_vocab_size"} & msgspec.to_builtins(spec).keys()
    changed = msgspec.structs.replace(spec, value_scale=0.5)
    assert msgspec.json.decode(msgspec.json.encode(changed), type=DraftSpec) == changed != spec


def layers(directory: Path) -> list[tuple[int | None, bool]]:
    return [(layer.sliding_window, layer.causal) for layer in read_draft(directory).spec.layers]


@pytest.fixture
def sliding_draft(tmp_path: Path) -> Path:
    return write_random_draft(tmp_path / "draft", dialect="qwen3", layer_types=MIXED, sliding_window=7)


def test_sliding_layers_are_causal_where_nothing_is_said(sliding_draft: Path) -> None:
    assert layers(sliding_draft) == [(7, True), (None, False), (7, True)]


@pytest.mark.parametrize("key", ["is_causal", "dflash_config__is_causal", "dflash_config__causal"])
@pytest.mark.parametrize("value", [True, False])
def test_said_causality_holds_for_every_layer(key: str, value: bool, sliding_draft: Path) -> None:
    assert layers(edit_config(sliding_draft, **{key: value})) == [(7, value), (None, value), (7, value)]


def test_is_causal_beats_causal(sliding_draft: Path) -> None:
    edit_config(sliding_draft, is_causal=False, dflash_config__causal=True)
    assert layers(sliding_draft) == [(7, False), (None, False), (7, False)]


def test_two_values_of_is_causal(sliding_draft: Path) -> None:
    edit_config(sliding_draft, is_causal=False, dflash_config__is_causal=True)
    assert "is_causal: expected the same value as in dflash_config.is_causal" in refusal(
        lambda: read_draft(sliding_draft)
    )


def test_sliding_layers_need_a_window(sliding_draft: Path) -> None:
    edit_config(sliding_draft, "sliding_window")
    message = refusal(lambda: read_draft(sliding_draft))
    assert "missing key sliding_window: expected an integer from 1 to 2147483647" in message


def test_a_window_without_sliding_layers_is_no_window(draft_dir: Path) -> None:
    """The gpt-oss drafters copy the target's sliding_window and have only full layers."""
    assert layers(edit_config(draft_dir, sliding_window=128)) == [(None, False)] * 3


def test_no_layer_types_are_full_layers(draft_dir: Path) -> None:
    assert layers(edit_config(draft_dir, "layer_types")) == [(None, False)] * 3


def test_a_window_that_stands_nowhere_is_not_ignored(sliding_draft: Path) -> None:
    edit_config(sliding_draft, "layer_types", use_sliding_window=True)
    message = refusal(lambda: read_draft(sliding_draft))
    assert "use_sliding_window: expected layer_types" in message


def test_modelopt_spells_windows_in_dflash_config(draft_dir: Path) -> None:
    """layer_types stay all full there; the block is not causal although every layer slides."""
    edit_config(draft_dir, dflash_config__use_swa=True, dflash_config__swa_window_size=5, dflash_config__causal=False)
    assert layers(draft_dir) == [(5, False)] * 3


def test_modelopt_window_without_a_size(draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, dflash_config__use_swa=True)))
    assert "dflash_config.swa_window_size: expected an integer from 1" in message


def test_modelopt_without_a_window(draft_dir: Path) -> None:
    edit_config(draft_dir, dflash_config__use_swa=False, dflash_config__swa_window_size=5)
    assert layers(draft_dir) == [(None, False)] * 3


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
