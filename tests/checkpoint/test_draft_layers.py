# SPDX-License-Identifier: Apache-2.0
"""Windows and causality by layer, in every dialect that spells them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from tests.checkpoint.samples import edit_config, refusal
from tests.reference.synthetic import write_random_draft

FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING, FULL, SLIDING]


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
