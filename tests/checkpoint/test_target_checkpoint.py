# SPDX-License-Identifier: Apache-2.0
"""The target's facts, whether a draft fits them, and the bytes it keeps of a request, against hand-made numbers."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.target_cache import FULL, LINEAR, SLIDING, TargetCache, read_target_cache
from dflash_trt.checkpoint.target_checkpoint import TargetSpec, check_pair, read_target
from dflash_trt.errors import CheckpointError
from tests.checkpoint.samples import edit_config, edit_tensors, refusal, write_target
from tests.checkpoint.test_facts import VALUES

QWEN_3_NEXT = {
    "full_attention_interval": 4, "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
}  # fmt: skip
GEMMA_4_31B = {
    "layer_types": ([SLIDING] * 5 + [FULL]) * 10, "sliding_window": 1024, "num_key_value_heads": 16, "head_dim": 256,
    "attention_k_eq_v": True, "num_global_key_value_heads": 4, "global_head_dim": 512, "num_kv_shared_layers": 0,
}  # fmt: skip
KIMI_K2 = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 64}


def read(facts: dict[str, object], num_layers: int) -> TargetCache | None:
    return read_target_cache(Facts(facts, Path("config.json")), num_layers)


def known(facts: dict[str, object], num_layers: int) -> TargetCache:
    cache = read(facts, num_layers)
    assert cache is not None
    return cache


def test_rows_of_heads() -> None:
    cache = known({"num_key_value_heads": 8, "hidden_size": 4096, "num_attention_heads": 32}, 36)
    assert cache.bytes(10, fp8=False) == 36 * 10 * 2 * 8 * 128 * 2
    assert cache.bytes(10, fp8=True, num_ranks=16) == 36 * 10 * 2 * 1 * 128


def test_a_hybrid_keeps_a_state_for_each_request_and_rows_in_every_fourth_layer() -> None:
    """State of Qwen3-Next-80B: 32 heads of 128 x 128 in FLOAT, and three inputs of a convolution of 8192 channels."""
    cache = known(QWEN_3_NEXT, 48)
    state = 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert cache.bytes(1000, fp8=False) == 12 * 1000 * 2 * 2 * 256 * 2 + state
    assert cache.bytes(0, fp8=True) == state, "the state is no row of the cache: it stays as it is"
    assert cache.bytes(0, fp8=True, num_ranks=8) == 36 * (4 * 128 * 128 * 4 + (2 * 2 + 4) * 128 * 3 * 2)
    assert known({**QWEN_3_NEXT, "layer_types": ([LINEAR] * 3 + [FULL]) * 12}, 48) == cache


def test_latent_attention_keeps_one_row_on_every_rank() -> None:
    """Rows of Kimi K2: 61 layers of 512 + 64 numbers."""
    assert known(KIMI_K2, 61).bytes(1, fp8=False) == 61 * 576 * 2
    assert known(KIMI_K2, 61).bytes(7, fp8=True, num_ranks=8) == 61 * 576 * 7


def test_gemma_4_has_other_heads_in_its_full_layers() -> None:
    expected = 10 * 5000 * 2 * 4 * 512 * 2 + 50 * 1024 * 2 * 16 * 256 * 2
    assert known(GEMMA_4_31B, 60).bytes(5000, fp8=False) == expected
    written = {key: GEMMA_4_31B[key] for key in ("layer_types", "sliding_window", "num_key_value_heads", "head_dim")}
    own = {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}
    assert known({**written, "per_layer_config": own}, 60).bytes(5000, fp8=False) == expected, "as transformers writes"
    assert read({**written, "per_layer_config": own | {"5": {"head_dim": 64}}}, 60) is None
    own_heads = known({**GEMMA_4_31B, "attention_k_eq_v": False}, 60)
    assert own_heads.bytes(1, fp8=True) == 10 * 2 * 16 * 512 + 50 * 2 * 16 * 256


def test_layers_that_share_rows_and_a_pattern_from_before_layer_types() -> None:
    cache = known({**GEMMA_4_31B, "num_kv_shared_layers": 12}, 60)
    assert (cache.num_full_layers, cache.num_sliding_layers) == (8, 40)
    facts = {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 4, "sliding_window_pattern": 6}
    assert known(facts, 13).bytes(100, fp8=True) == 2 * 8 * (2 * 100 + 11 * 4)


@pytest.mark.parametrize(
    "facts",
    [
        {"layer_types": ["conv", FULL], "num_key_value_heads": 1, "head_dim": 8},
        {**KIMI_K2, "index_head_dim": 128},
        {**KIMI_K2, "layer_types": [LINEAR, FULL]},
    ],
)
def test_what_is_not_known_here(facts: dict[str, object]) -> None:
    assert read(facts, 2) is None


OWN_HEADS = {str(i): {"head_dim": 512} for i in range(5, 60, 6)}
PUBLISHED: list[tuple[dict[str, object], int]] = [
    (QWEN_3_NEXT, 48),
    (GEMMA_4_31B | {"per_layer_config": OWN_HEADS}, 60),
    (GEMMA_4_31B, 60),
    (KIMI_K2, 61),
]


@settings(max_examples=50)
@given(published=st.sampled_from(PUBLISHED), value=VALUES, data=st.data())
def test_any_value_is_counted_or_refused(published: tuple[dict[str, object], int], value: object, data: Any) -> None:
    facts, num_layers = published
    key = data.draw(st.sampled_from(sorted(facts)))
    with suppress(CheckpointError):
        cache = read({**facts, key: value}, num_layers)
        assert cache is None or 0 <= cache.bytes(1, fp8=True) <= cache.bytes(1000, fp8=False, num_ranks=1)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({**QWEN_3_NEXT, "layer_types": [FULL] * 3}, "layer_types: expected 48 of them (num_hidden_layers), found"),
        (
            {key: value for key, value in QWEN_3_NEXT.items() if key != "full_attention_interval"},
            "missing key layer_types: expected the kind of each layer, or full_attention_interval",
        ),
        ({**QWEN_3_NEXT, "linear_key_head_dim": None}, "linear_key_head_dim: expected an integer"),
        ({**GEMMA_4_31B, "layer_types": [FULL] * 48, "global_head_dim": None}, "global_head_dim: expected an integer"),
        ({**GEMMA_4_31B, "layer_types": [FULL] * 48, "num_kv_shared_layers": 49}, "num_kv_shared_layers: expected"),
        ({"kv_lora_rank": 512}, "missing key qk_rope_head_dim: expected an integer"),
    ],
)
def test_a_missing_fact_is_never_guessed(facts: dict[str, object], words: str) -> None:
    assert f"config.json: {words}" in refusal(lambda: read(facts, 48))


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


@pytest.mark.parametrize(
    ("model_type", "tap_width", "refused"),
    [
        ("deepseek_v4", None, None), ("glm5_next", None, None),  # the mean of the streams
        ("deepseek_v4", 4 * 48, None), ("hy_v4", 4 * 48, None),  # all of them
        ("hy_v4", None, "width of a tap of hy_v4's 4 residual streams: expected all of them (192)"),
        ("deepseek_v4", 2 * 48, "hidden_size: expected 48 (target), found 96 (draft)"),
    ],
)  # fmt: skip
def test_taps_of_several_residual_streams(
    model_type: str, tap_width: int | None, refused: str | None, draft_dir: Path, tmp_path: Path
) -> None:
    """A draft's width says whether it reads their mean or all; which one it is else, nobody says."""
    target = read_target(write_target(tmp_path / "other", model_type=model_type, hc_mult=4)).spec
    draft = msgspec.structs.replace(read_draft(draft_dir).spec, model_type="qwen3", tap_hidden_size=tap_width)

    def check() -> None:
        check_pair(draft, target, draft_name="DRAFT", target_name="TARGET")

    if refused is None:
        check()
    else:
        assert refused in refusal(check)


def test_tap_out_of_range(draft_dir: Path, tmp_path: Path) -> None:
    """Where the draft does not say how many layers its target has, its taps do; the last layer is in range."""
    draft = read_draft(edit_config(draft_dir, "num_target_layers")).spec
    fits, short = (read_target(write_target(tmp_path / str(n), num_hidden_layers=n)).spec for n in (4, 3))
    check_pair(draft, fits, draft_name="DRAFT", target_name="TARGET")
    message = refusal(lambda: check_pair(draft, short, draft_name="DRAFT", target_name="TARGET"))
    assert "target_layer_ids: expected layers 0 to 2 (target), found [1, 2, 3] (draft)" in message


def test_a_draft_exported_as_qwen3_fits_a_gpt_oss_target(draft_dir: Path, target_dir: Path) -> None:
    draft = read_draft(edit_config(draft_dir, model_type="qwen3")).spec
    check_pair(draft, read_target(target_dir).spec, draft_name="DRAFT", target_name="TARGET")


def test_what_is_no_target(draft_dir: Path, target_dir: Path) -> None:
    assert "expected a target, found a DFlash draft" in refusal(lambda: read_target(draft_dir))
    edit_config(target_dir, num_hidden_layers=10**15)
    assert "num_hidden_layers: expected an integer from 1 to" in refusal(lambda: read_target(target_dir))
