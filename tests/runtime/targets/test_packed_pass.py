# SPDX-License-Identifier: Apache-2.0
"""Targets that keep many sequences, against the same models' own attention over each whole sequence."""

from __future__ import annotations

from typing import Any
from unittest.mock import PropertyMock, patch

import pytest
import torch
from transformers import DynamicCache

from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.cpu.accelerate import PagedPass, accelerate
from dflash_trt.runtime.kvcache import slot_cache
from dflash_trt.runtime.kvcache.page_memory import FIRST_PAGES
from dflash_trt.runtime.kvcache.slot_cache import SlotCache
from dflash_trt.runtime.targets import packed_pass
from dflash_trt.runtime.targets.huggingface import PACKED_MODEL_TYPES, can_pack, make_target
from dflash_trt.runtime.targets.packed_pass import GatheredPass, RaggedPass
from dflash_trt.runtime.targets.packed_target import Acceleration, PackedTarget, padded_size
from dflash_trt.runtime.targets.sequential_target import SequentialTarget
from dflash_trt.runtime.targets.target import Segment
from tests.runtime.targets.families import (
    ALTERNATING,
    GEMMA_4,
    NUM_SLOTS,
    PACKED,
    SEQUENTIAL_MODELS,
    TAPS,
    VOCAB_SIZE,
    computed,
    family_model,
    random_history,
    random_model,
    recomputed,
    relative_error,
)

TOLERANCE = 1e-4


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that sequences outgrow it."""
    monkeypatch.setattr(slot_cache, "FIRST_PAGES", 1)


def test_every_packed_family_is_compared() -> None:
    assert {model_type for model_type, _ in PACKED.values()} == PACKED_MODEL_TYPES


BY_TORCH = ("deepseek_v3", "gemma4", "gpt_oss", "qwen3_5")
"""Packed families that differ most: torch's operators see no more of the others than the CPU's do."""
ALIKE = {"gemma3_text", "gemma4-moe", "llama", "llama-3", "mistral", "mistral-full", "qwen2", "qwen3_moe"}
"""Families whose layers are those of others."""


@pytest.mark.parametrize(
    ("name", "by_torch"),
    [
        pytest.param(n, by_torch, marks=pytest.mark.full if n in ALIKE or (by_torch and n not in BY_TORCH) else ())
        for n in PACKED
        for by_torch in (False, True)
    ],
)
@pytest.mark.usefixtures("small_cache")
def test_a_packed_pass_is_the_models_own(name: str, by_torch: bool) -> None:
    """By torch's operators, too, which run on a GPU and where runtime/cpu is not used."""
    model, turns = family_model(name), random_history(seed=len(name))
    expected = recomputed(model, turns)
    assert can_pack(model)
    target = PackedTarget(model, TAPS, NUM_SLOTS) if by_torch else make_target(model, TAPS, NUM_SLOTS, accelerate)
    assert isinstance(target, PackedTarget)
    assert relative_error(computed(target, turns), expected) < TOLERANCE


@pytest.mark.usefixtures("small_cache")
def test_long_sequences_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they would be copied as long as the longest: here up to three pages of one, or one of three."""
    monkeypatch.setattr(packed_pass, "MAX_PAGES", 3)
    model, turns = family_model("qwen3_5"), random_history(seed=1)
    expected, target = recomputed(model, turns), PackedTarget(model, TAPS, NUM_SLOTS)
    assert relative_error(computed(target, turns), expected) < TOLERANCE
    assert [len(part) for part in parts(target.cache, [1, 2, 40, 1, 70, 3])] == [2, 1, 1, 1, 1]


def parts(cache: SlotCache, lengths: list[int]) -> list[list[int]]:
    """The parts of segments of one token after `lengths` tokens."""
    cache.table.lengths, cache.table.pages = lengths, [[0, 1, 2]] * len(lengths)
    segments = [Segment(slot=slot, token_ids=[5], num_logits=1) for slot in range(len(lengths))]
    return GatheredPass(segments, cache, torch.device("cpu"))._parts([*range(len(lengths))])


@pytest.mark.full
@pytest.mark.parametrize("name", SEQUENTIAL_MODELS)
def test_a_sequential_pass_is_the_models_own(name: str) -> None:
    """Models that are packed elsewhere, as they run where they are spread over GPUs."""
    model, turns = family_model(name), random_history(seed=len(name))
    expected = recomputed(model, turns)
    assert relative_error(computed(SequentialTarget(model, TAPS, NUM_SLOTS), turns), expected) < TOLERANCE


@pytest.mark.parametrize("pass_type", [PagedPass, GatheredPass])
def test_reserved_pages_need_no_room_before_they_are_written(pass_type: type[RaggedPass]) -> None:
    model = random_model("qwen3", num_hidden_layers=1)
    target = PackedTarget(model, (), NUM_SLOTS, Acceleration(pass_type=pass_type))
    target.reserve(0, range(2 * FIRST_PAGES), 0)
    target.verify([Segment(slot=0, token_ids=[1, 2], num_logits=0)], with_taps=False)
    (k, _), *_ = target.cache.layers.values()
    assert k.shape[1] == FIRST_PAGES


@torch.inference_mode()
@pytest.mark.parametrize("pass_type", [PagedPass, GatheredPass])
def test_a_neighbours_nan_is_nobody_elses(pass_type: type[RaggedPass]) -> None:
    """Where hidden rows are read, its page is zeros when it is used again, and a shorter sequence is filled up with a
    page of its own."""
    target = PackedTarget(random_model("qwen3"), TAPS, NUM_SLOTS, Acceleration(pass_type=pass_type))
    target.reserve(0, [0, 1], 0)
    target.verify([Segment(slot=0, token_ids=[1] * (2 * TOKENS_PER_PAGE), num_logits=0)], with_taps=False)
    for cache in (cache for layer in target.cache.layers.values() for cache in layer):
        cache[:, :2] = torch.nan
    target.release(0)
    target.reserve(1, [1], 0)
    target.reserve(2, [5, 3], 0)
    target.verify([Segment(slot=2, token_ids=[2] * TOKENS_PER_PAGE, num_logits=0)], with_taps=False)
    both = [Segment(slot=slot, token_ids=[3], num_logits=1) for slot in (1, 2)]
    assert target.verify(both, with_taps=False).logits.isfinite().all()


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_longest_request_are_not_packed(rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 16}
    assert not can_pack(random_model("llama", rope_parameters=rope))
    layers = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    assert not can_pack(random_model("gemma3_text", rope_parameters=layers, layer_types=ALTERNATING))


@pytest.mark.parametrize("target_type", [PackedTarget, SequentialTarget])
def test_bytes_per_token_are_those_of_k_and_v(target_type: type[PackedTarget | SequentialTarget]) -> None:
    gpt_oss = target_type(family_model("gpt_oss"), TAPS, NUM_SLOTS)
    assert gpt_oss.cache_bytes_per_token == 4 * (4 * 2 * (16 + 16))  # FLOAT, layers, heads, dimensions of K and V
    latent = target_type(family_model("deepseek_v3"), TAPS, NUM_SLOTS)
    if target_type is SequentialTarget:  # transformers keeps the latent vector and the rotated part of k
        assert latent.cache_bytes_per_token == 4 * (4 * (16 + 8))
    else:
        assert latent.cache_bytes_per_token == 4 * (4 * 4 * (16 + 12))
        model = family_model("deepseek_v3")
        accelerated = PackedTarget(model, TAPS, NUM_SLOTS, accelerate(model))
        assert accelerated.cache_bytes_per_token == 4 * (4 * 4 * (16 + 16))  # 12 of V, filled up to a vector


@pytest.mark.parametrize("target_type", [PackedTarget, SequentialTarget])
def test_state_of_fixed_size_is_counted_for_each_slot(target_type: type[PackedTarget | SequentialTarget]) -> None:
    """Twice, because a rollback needs the state before the last segment."""
    target = target_type(family_model("qwen3_5"), TAPS, NUM_SLOTS)
    assert target.cache_bytes_per_token == 4 * (2 * 2 * (16 + 16))
    channels, kernel = 2 * 2 * 8 + 4 * 8, 4
    columns = kernel - 1 if target_type is PackedTarget else kernel  # transformers keeps one that it never reads
    assert target.cache_bytes_per_slot == 2 * 2 * 4 * (channels * columns + 4 * 8 * 8)
    assert target_type(random_model("qwen3"), TAPS, NUM_SLOTS).cache_bytes_per_slot == 0


def test_a_gemma_that_looks_ahead_is_refused() -> None:
    model = random_model("gemma4_text", **GEMMA_4, use_bidirectional_attention="all")
    with pytest.raises(CheckpointError, match="found gemma4_text: logits of token 1 differ"):
        make_target(model, TAPS, NUM_SLOTS)


def test_one_line_says_how_a_target_is_computed() -> None:
    packed = PackedTarget(family_model("qwen3_5"), TAPS, NUM_SLOTS).summary
    assert packed == (
        "target: qwen3_5_text in float32 on cpu: all requests in one pass, torch's attention, paged cache,"
        " recurrent state replayed"
    )
    sequential = SequentialTarget(family_model("qwen3_5"), TAPS, NUM_SLOTS).summary
    assert sequential.endswith("one after the other, transformers' eager attention, copied cache")


def test_a_state_that_says_it_can_be_cropped_is_not_believed() -> None:
    """Rollback is proved before it is relied on: the accepted tokens are computed again."""
    model, turns = family_model("qwen3_next"), random_history(seed=0, num_turns=4)
    expected = recomputed(model, turns)
    with patch.object(DynamicCache, "is_croppable", PropertyMock(return_value=True)):
        target = SequentialTarget(model, TAPS, NUM_SLOTS)
        assert relative_error(computed(target, turns), expected) < TOLERANCE


@pytest.mark.parametrize("target_type", [PackedTarget, SequentialTarget])
def test_logits_and_taps_only_where_asked_for(target_type: type[PackedTarget | SequentialTarget]) -> None:
    target = target_type(random_model("qwen3"), TAPS, NUM_SLOTS)
    segments = [
        Segment(slot=2, token_ids=[1, 2, 3], num_logits=0),
        Segment(slot=0, token_ids=[4, 5], num_logits=2),
        Segment(slot=1, token_ids=[6], num_logits=1),
    ]
    verified = target.verify(segments, with_taps=False)
    assert verified.logits.shape == (3, VOCAB_SIZE)
    assert verified.logits.dtype == torch.float32
    assert not verified.tapped


WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}


def test_every_size_holds_its_rows() -> None:
    """A size is at most an eighth more, and there are few: kernels are made and kept for each."""
    sizes = [padded_size(rows) for rows in range(1, 1025)]
    assert all(rows <= size <= rows * 9 / 8 for rows, size in enumerate(sizes, start=1))
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 16 + 8 * 6


@pytest.mark.parametrize(
    ("dtype", "settings", "sizes"),
    [(torch.bfloat16, {}, [36, 20]), (torch.bfloat16, WIDE, [35, 19]), (torch.float32, {}, [35, 19])],
    ids=["bfloat16", "wide-bfloat16", "float32"],
)
def test_layers_see_few_sizes_where_onednn_is_asked(
    dtype: torch.dtype, settings: dict[str, int], sizes: list[int]
) -> None:
    """In BF16, for short rows; callers see their rows."""
    model = random_model("qwen3", num_hidden_layers=1, **settings).to(dtype)
    target = PackedTarget(model, (0,), 1, accelerate(model))
    seen = []
    for layer in (model.model.layers[0].mlp.up_proj, model.lm_head):
        layer.register_forward_pre_hook(lambda _, rows: seen.append(rows[0].numel() // rows[0].shape[-1]))
    verified = target.verify([Segment(slot=0, token_ids=[1] * 35, num_logits=19)], with_taps=True)
    assert seen == sizes
    assert target.is_batch_invariant or not settings, "all products are ours"
    assert (len(verified.logits), len(verified.taps)) == (19, 35)
