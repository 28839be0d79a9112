# SPDX-License-Identifier: Apache-2.0
"""What TensorRT's parser and builder ask of graphs with features that z-lab's v1 drafts do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest

from dflash_trt.checkpoint.draft_spec import DraftLayer
from dflash_trt.checkpoint.rope import Rope
from dflash_trt.engine.graph.draft_graph import ATTENTION
from tests.contract.builder_model import problems
from tests.contract.onnx_operators import RELEASES
from tests.contract.plugin_creator import refusals
from tests.featured import build_featured, featured_draft
from tests.paths import FIXTURES
from tests.runtime.test_dialects_decode import reduced_head

LAYERS = tuple(
    DraftLayer(sliding_window=window, causal=causal, sinks=sinks)
    for window, causal, sinks in ((4, True, True), (None, False, False), (7, False, True))
)
FEATURES: dict[str, dict[str, Any]] = {
    "own head": {"draft_vocab_size": 1024, "own_embedding": True},
    "reduced head": {"draft_vocab_size": 300},
    "Laguna": {"tap_norms": True, "context_input_layernorm": True, "attention_gate": "per_head"},
    "MiMo": {"layers": LAYERS, "value_scale": 0.707, "biases": ("q_proj", "v_proj", "fc"), "mask_embedding": True},
    "gate an element": {"attention_gate": "per_element"},
    "partial rotary": {"rope": Rope(theta=1e4, scaling=None, partial_rotary_factor=0.5)},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_builder_takes_it(feature: str, tmp_path: Path) -> None:
    tensors = reduced_head()[0] if feature == "reduced head" else {}
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", tmp_path / "draft", FEATURES[feature], tensors)
    build_featured(draft, tmp_path / "engine")
    for name in ("context", "draft"):
        model = onnx.load(tmp_path / "engine" / f"{name}.onnx", load_external_data=False)
        for release in RELEASES:
            assert problems(model, release, tmp_path / "engine") == []


def test_windows_and_causality_reach_the_plugin_layer_by_layer(tmp_path: Path) -> None:
    """By the real creator; sinks are its tenth input."""
    pytest.importorskip("tensorrt_lean_bindings", reason="pip install -e '.[dev]' has it on Linux x86-64")
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", tmp_path / "draft", {"layers": LAYERS})
    build_featured(draft, tmp_path / "engine")
    model = onnx.load(tmp_path / "engine" / "draft.onnx", load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == ATTENTION]
    assert refusals(nodes) == [""] * 3
    attributes = [{a.name: a.i for a in node.attribute} for node in nodes]
    found = [
        (a["sliding_window"] or None, bool(a["causal"]), len(n.input) == 10)
        for a, n in zip(attributes, nodes, strict=True)
    ]
    assert found == [msgspec.structs.astuple(layer) for layer in LAYERS]
