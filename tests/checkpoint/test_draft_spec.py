# SPDX-License-Identifier: Apache-2.0
"""The tensors that each fact demands, and what a spec says of itself in JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import DraftSpec

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
