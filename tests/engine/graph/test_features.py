# SPDX-License-Identifier: Apache-2.0
"""Features beyond z-lab's v1 drafts, one by one: both graphs against the float64 equations, 1e-5 relative."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.checkpoint.draft_spec import DraftLayer
from dflash_trt.checkpoint.rope import Llama3, Rope, Yarn
from tests.engine.graph.test_parity import compare_context, compare_draft, features
from tests.engines import Graphs
from tests.featured import build_featured, featured_draft
from tests.reference.dflash_float64 import AttentionRule, ReferenceDrafter, llama3, read_rotary, yarn
from tests.reference.synthetic import write_random_draft

WINDOW, N, D = 7, 4, 16
YARN = {"factor": 32.0, "original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
LAYERS = (
    DraftLayer(sliding_window=3, causal=True),
    DraftLayer(sliding_window=WINDOW, causal=False),
    DraftLayer(sliding_window=None, causal=True),
)
SINKS = tuple(
    DraftLayer(sliding_window=layer.sliding_window, causal=False, sinks=layer.sliding_window is not None)
    for layer in LAYERS
)
LAGUNA = {"tap_norms": True, "context_input_layernorm": True}


def rules(layers: tuple[DraftLayer, ...]) -> list[AttentionRule]:
    return [AttentionRule(causal=layer.causal, window=layer.sliding_window) for layer in layers]


@dataclass(frozen=True)
class Case:
    """Facts as a reader sets them, and the same in the reference's words; tensors speak for themselves there."""

    name: str
    facts: dict[str, Any]
    reference: dict[str, Any] = field(default_factory=dict)
    dialect: Any = "qwen3"


def partial(dialect: str, scaling: Any, theta: float, factor: float) -> Case:
    rope = Rope(theta=theta, scaling=scaling, partial_rotary_factor=factor)
    dims = int(D * factor)
    config = {"rope_theta": theta} | ({"rope_scaling": YARN | {"rope_type": "yarn"}} if scaling else {})
    reference = {"rotary": read_rotary(config, dims), "rotary_dim": dims}
    return Case(f"partial rotary {dims} {dialect}", {"rope": rope}, reference, dialect)


CASES = [
    Case("biases of q and v, fc and MLP", {"biases": ("fc", "q_proj", "v_proj", "up_proj", "down_proj")}),
    Case("biases of q, k and v", {"biases": ("q_proj", "k_proj", "v_proj")}),
    Case("value scale", {"value_scale": 0.707}, {"value_scale": 0.707}),
    Case("embedding scale", {"input_embedding_scale": 48**0.5}, {"embedding_scale": 48**0.5}),
    Case("norms of taps", {"tap_norms": True}, {"tap_norms": True}),
    Case("context through input_layernorm", {"context_input_layernorm": True}, {"context_input_layernorm": True}),
    Case("gate a head", {"attention_gate": "per_head"}, {"gate": N}),
    Case("gate an element", {"attention_gate": "per_element"}, {"gate": N * D}),
    Case("window and causality by layer", {"layers": LAYERS}, {"rules": rules(LAYERS)}),
    Case("sinks", {"layers": SINKS}, {"rules": rules(SINKS)}),
    Case("taps of another width", {"tap_hidden_size": 32, "own_embedding": True, "draft_vocab_size": 96}),
    Case("llama3", {"rope": Rope(theta=1e4, scaling=Llama3(**LLAMA3))}, {"rotary": llama3(LLAMA3, 1e4, D)}),
    Case("YaRN, truncated", {"rope": Rope(theta=1e4, scaling=Yarn(**YARN | {"truncate": True}, attention_factor=1.25))},
         {"rotary": yarn(YARN | {"truncate": True, "attention_factor": 1.25}, 1e4, D)}),
    partial("qwen3", None, 1e6, 0.5),
    partial("gpt_oss", Yarn(**YARN, attention_factor=0.1 * math.log(32) + 1), 150000.0, 0.25),
    Case("Laguna", {"attention_gate": "per_head", "layers": LAYERS, **LAGUNA},
         {"gate": N, "rules": rules(LAYERS), **LAGUNA}),
    Case("MiMo", {"layers": SINKS, "value_scale": 0.707, "mask_embedding": True},
         {"rules": rules(SINKS), "value_scale": 0.707}, "gpt_oss"),
]  # fmt: skip


@dataclass(frozen=True)
class Built:
    """One case: our graphs, the equations, and those of the draft without the feature."""

    graphs: Graphs
    reference: ReferenceDrafter
    without: ReferenceDrafter


def build_case(case: Case, directory: Path) -> Built:
    base = write_random_draft(directory / "base", dialect=case.dialect)
    build_featured(featured_draft(base, directory / "draft", case.facts), directory / "engine")
    reference = ReferenceDrafter.load(directory / "draft", case.reference)
    plain = ReferenceDrafter.load(base)
    known = {name: tensor for name, tensor in reference.tensors.items() if name in plain.tensors}
    return Built(Graphs(directory / "engine"), reference, replace(plain, tensors=known))


QUICK = ("biases of q and v, fc and MLP", "partial rotary 4 gpt_oss", "Laguna", "MiMo")
PARAMETERS = [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.full) for c in CASES]


@pytest.fixture(scope="module", params=PARAMETERS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_case(request.param, tmp_path_factory.mktemp("feature"))


@pytest.mark.parametrize("begin", [0, 250])
def test_context(built: Built, begin: int) -> None:
    compare_context(built.graphs, built.reference, begin)


@pytest.mark.parametrize("length", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_draft(built: Built, length: int) -> None:
    compare_draft(built.graphs, built.reference, length)


def test_left_out_it_would_show(built: Built) -> None:
    """So that the two tests above fail where a feature is dropped."""
    graphs = built.graphs
    if graphs.spec.tap_hidden_size is not None:
        return  # without it nothing fits
    S, H, length = graphs.spec.block_size, graphs.spec.hidden_size, 40
    taps = features(graphs, length).astype(np.float64)
    noise = np.random.default_rng(0).standard_normal((S, H))
    block = np.arange(length, length + S)
    with_it, without = (
        r.draft(noise, *r.context_kv(taps, np.arange(length)), block) for r in (built.reference, built.without)
    )
    assert np.abs(with_it - without).max() > 1e-2 * np.abs(with_it).max()
