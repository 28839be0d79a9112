# SPDX-License-Identifier: Apache-2.0
"""The draft's facts and tensors: read, each as config.json demands it, or refused with the file and the key."""

from collections.abc import Callable
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
Change = Callable[[dict[str, torch.Tensor]], object]


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def without_biases(tensors: dict[str, torch.Tensor]) -> None:
    """What other converters drop without a word."""
    for name in [name for name in tensors if name.endswith(".bias")]:
        del tensors[name]


SHAPES = [
    ("fc.weight", (48, 96), [48, 144]),  # two taps instead of three
    ("layers.0.self_attn.q_norm.weight", (64,), [16]),
    ("layers.2.mlp.down_proj.weight", (80, 48), [48, 80]),
    (V_BIAS, (32, 1), [32]),
    ("norm.weight", (), [48]),
]
WRONG_TENSORS: list[tuple[Change, str]] = [
    (lambda tensors: tensors.pop(V_BIAS), f"DIR: missing tensor '{V_BIAS}' [32] (1 of 48 missing)"),
    (without_biases, "12 of 48 missing"),
    *(
        (put(name, torch.zeros(2)), f"found tensor '{name}' besides (1 that nothing would use)")
        for name in ("layers.3.mlp.up_proj.weight", "d2t")
    ),
    *(
        (put(name, torch.zeros(2)), f"tensor '{name}': expected shape [96, 48], found [2]")
        for name in ("embed_tokens.weight", "lm_head.weight")
    ),
    *(
        (
            put(name, torch.zeros(shape, dtype=torch.bfloat16)),
            f"model.safetensors: tensor '{name}': expected shape {expected}, found {list(shape)}",
        )
        for name, shape, expected in SHAPES
    ),
]


@pytest.mark.parametrize(("change", "words"), WRONG_TENSORS)
def test_wrong_tensors(change: Change, words: str, draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_tensors(draft_dir, change)))
    assert words.replace("DIR", str(draft_dir)) in message


def test_biases_that_the_facts_deny(draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, attention_bias=False)))
    assert "model.safetensors: expected the 36 tensors that config.json describes" in message
    assert "found tensor 'layers.0.self_attn.k_proj.bias' besides (12 that nothing would use)" in message


def test_extra_tensor_in_a_shard_is_named_with_its_file(draft_dir: Path) -> None:
    edit_tensors(draft_dir, lambda tensors: tensors.update({"zzz": torch.zeros(2)}))
    message = refusal(lambda: read_draft(shard(draft_dir)))
    assert message.startswith(f"{draft_dir}/model-0000")


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


def test_facts_without_tensors_of_their_own(spec: DraftSpec) -> None:
    """Sinks are by layer; recipes say of all linear layers, not of embedding and head, how they are quantised."""
    layers = (msgspec.structs.replace(spec.layers[0], sinks=True), *spec.layers[1:])
    changed = msgspec.structs.replace(spec, layers=layers)
    assert dict(changed.tensor_shapes().items() - spec.tensor_shapes().items()) == {"layers.0.self_attn.sinks": (N,)}
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


LAYERS: list[tuple[dict[str, object], list[tuple[int | None, bool]]]] = [
    ({}, [(7, True), (None, False), (7, True)]),
    *(
        ({key: value}, [(7, value), (None, value), (7, value)])
        for key in ("is_causal", "dflash_config__is_causal", "dflash_config__causal") for value in (True, False)
    ),
    ({"is_causal": False, "dflash_config__causal": True}, [(7, False), (None, False), (7, False)]),
]  # fmt: skip


@pytest.mark.parametrize(("said", "expected"), LAYERS)
def test_causality(said: dict[str, object], expected: list[tuple[int | None, bool]], sliding_draft: Path) -> None:
    """Sliding layers are causal where nothing is said; what is said holds for every layer."""
    assert layers(edit_config(sliding_draft, **said)) == expected


@pytest.mark.parametrize(
    ("removed", "changed", "words"),
    [
        ([], {"is_causal": False, "dflash_config__is_causal": True},
         "is_causal: expected the same value as in dflash_config.is_causal"),
        (["sliding_window"], {}, "missing key sliding_window: expected an integer from 1 to 2147483647"),
        (["layer_types"], {"use_sliding_window": True}, "use_sliding_window: expected layer_types"),
        ([], {"dflash_config__use_swa": True, "layer_types": ["full_attention"] * 3},
         "dflash_config.swa_window_size: expected an integer from 1"),
        ([], {"dflash_config__use_swa": True, "dflash_config__swa_window_size": 5},
         "dflash_config.swa_window_size: expected sliding_window, which the sliding layers have, found 5"),
    ],
)  # fmt: skip
def test_windows_that_are_refused(
    removed: list[str], changed: dict[str, object], words: str, sliding_draft: Path
) -> None:
    assert words in refusal(lambda: read_draft(edit_config(sliding_draft, *removed, **changed)))


@pytest.mark.parametrize(
    ("removed", "changed", "expected"),
    [
        ([], {"sliding_window": 128}, (None, False)),  # gpt-oss drafters copy it from the target, and have full layers
        (["layer_types"], {}, (None, False)),
        # modelopt's spelling: layer_types stay all full, and the block is not causal although every layer slides.
        ([], {"use_swa": True, "swa_window_size": 5, "causal": False}, (5, False)),
        ([], {"use_swa": False, "swa_window_size": 5}, (None, False)),
        ([], {"use_swa": True, "swa_window_size": 5}, (5, False)),
    ],
)
def test_layers_that_are_all_alike(
    removed: list[str], changed: dict[str, object], expected: tuple[int | None, bool], draft_dir: Path
) -> None:
    section = {f"dflash_config__{key}" if "sliding" not in key else key: value for key, value in changed.items()}
    assert layers(edit_config(draft_dir, *removed, **section)) == [expected] * 3


REQUIRED = {
    "architectures": "a list of strings", "attention_bias": "true or false", "block_size": "an integer from 2",
    "dflash_config": "an object", "dflash_config__mask_token_id": "an integer from 0",
    "dflash_config__target_layer_ids": "a list of integers >= 0", "head_dim": "an integer from 2",
    "hidden_act": "one of silu", "model_type": "one of qwen3, gpt_oss", "rms_norm_eps": "a number > 0",
    "rope_theta": "a number > 0",
} | dict.fromkeys(
    ["hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads", "num_hidden_layers",
     "num_key_value_heads", "vocab_size"],
    "an integer from 1",
)  # fmt: skip


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
    """The key gone, or null in its place."""
    place = key.removeprefix("dflash_config__")
    if key == place:
        message = refusal(lambda: read_draft(edit_config(draft_dir, **{key: None})))
        assert f": expected {REQUIRED[key]}" in message
        assert "found null" in message
    message = refusal(lambda: read_draft(edit_config(draft_dir, key)))
    assert message.startswith(f"{draft_dir / 'config.json'}: ")
    assert f"{place}: expected {REQUIRED[key]}" in message
    assert "missing key" in message


WRONG: list[tuple[str, object, str]] = [
    ("architectures", ["Qwen3ForCausalLM"], "the name that its layout has, DFlashDraftModel in z-lab's, found ["),
    ("model_type", "llama", 'one of qwen3, gpt_oss, found "llama"'),
    ("hidden_act", "gelu", 'one of silu, found "gelu"'),
    ("num_hidden_layers", 10**9, "an integer from 1 to 1024, found 1000000000"),
    ("max_position_embeddings", 2**31 - 1, "an integer from 1 to 16777216"),
    ("num_key_value_heads", 3, "a divisor of num_attention_heads 4, found 3"),
    ("head_dim", 15, "an even number (rotary pairs), found 15"),
    ("block_size", 1, "an integer from 2 to 1024, found 1"),
    ("dflash_config__mask_token_id", 96, "a token id below vocab_size 96, found 96"),
    ("dflash_config__target_layer_ids", [1, 2, 1], "each layer once, found [1, 2, 1]"),
    ("dflash_config__target_layer_ids", [3, 1, 2],
     "layers in rising order, and fc.weight's columns in the same, found"),
    ("layer_types", ["full_attention"] * 2, "3 times full_attention or sliding_attention"),
    ("layer_types", ["full_attention"] * 2 + ["linear_attention"], "3 times full_attention"),
    ("num_target_layers", "6", 'an integer from 1 to 2147483647, found "6"'),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "words"), WRONG)
def test_wrong_value(key: str, value: object, words: str, draft_dir: Path) -> None:
    message = refusal(lambda: read_draft(edit_config(draft_dir, **{key: value})))
    assert f"{draft_dir / 'config.json'}: {key.replace('__', '.')}: expected {words}" in message


@pytest.mark.parametrize("key", ["final_logit_softcapping", "output_multiplier", "input_embedding_scale"])
def test_scales_of_embeddings_and_logits(key: str, draft_dir: Path) -> None:
    """Gemma's: read, but not whatever stands there."""
    assert getattr(spec_of(edit_config(draft_dir, **{f"dflash_config__{key}": 30.0})), key) == 30
    message = refusal(lambda: read_draft(edit_config(draft_dir, **{f"dflash_config__{key}": -1})))
    assert f"dflash_config.{key}: expected a number > 0, found -1" in message


OTHER = {"block_size": 8, "mask_token_id": 7, "target_layer_ids": [0, 1, 2]}


@pytest.mark.parametrize("key", OTHER)
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
    message = refusal(lambda: read_draft(edit_config(draft_dir, **{key: OTHER[key]})))
    assert f"config.json: {key}: expected the same value as in dflash_config.{key}, found {OTHER[key]}" in message
