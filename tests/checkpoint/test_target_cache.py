# SPDX-License-Identifier: Apache-2.0
"""Bytes that targets cache for a request, against numbers computed by hand."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.target_cache import FULL, LINEAR, SLIDING, TargetCache, read_target_cache
from dflash_trt.errors import CheckpointError
from tests.checkpoint.samples import refusal
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
