# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr: hidden states, candidates, scores and paths are those of vLLM's own head."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.engine import engine_directory
from dflash_trt.engine.candidate_scorer import LilicorrScorer
from dflash_trt.engine.graph.correlator_graph import correlator_graph
from dflash_trt.runtime.drafter.drafter import Drafter
from tests.decoding import Tables
from tests.oracle.vllm_lilicorr import CASES, SIZES, TOP_K, Case, run
from tests.paths import REPOSITORY
from tests.reference.synthetic import write_random_draft
from tests.runtime.drafter.walks import opened, walked

Arrays = dict[str, np.ndarray[Any, Any]]
ATOL = 1e-4


def golden(case: Case) -> Arrays:
    with np.load(REPOSITORY / "tests" / "golden" / "lilicorr" / "vectors.npz") as vectors:
        return {key: vectors[f"{case.name}/{key}"] for key in ("hidden", "ids", "scores", "path")}


def ours(case: Case, draft: Path, work: Path, *, rows: int = 1) -> Arrays:
    """Our drafter's walk; with more `rows`, in a batch of blocks with other contexts around it."""
    taps, table, head, anchor = case.inputs()
    drafter, slots = opened(draft, work, taps, case.num_context, rows)
    hidden, proposed, lattice = walked(drafter, slots, [anchor, *range(1, rows)], case.num_tokens, Tables(table, head))
    assert lattice is not None
    return {
        "hidden": hidden[0].numpy(),
        "ids": lattice.ids[0].numpy(),
        "scores": lattice.scores[0].numpy(),
        "path": np.array(proposed.token_ids),
    }


def assert_same(found: Arrays, expected: Arrays) -> None:
    for key in ("ids", "path"):
        np.testing.assert_array_equal(found[key], expected[key])
    for key in ("hidden", "scores"):
        np.testing.assert_allclose(found[key], expected[key], atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_vllms(case: Case, rows: int, tmp_path: Path) -> None:
    assert_same(ours(case, case.write(tmp_path / "draft"), tmp_path / "engine", rows=rows), golden(case))


@pytest.mark.full
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM's lilicorr.py in PYTHONPATH: tests/oracle/vllm_lilicorr.py")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_vllms_file_still_says_so(case: Case, tmp_path: Path) -> None:
    assert_same(run(case, tmp_path / "draft"), golden(case))


def test_the_last_context_row_is_each_slots_own(tmp_path: Path) -> None:
    """After several calls, some without rows for a slot, and after a slot was emptied."""
    draft = write_random_draft(tmp_path / "draft", dialect="qwen3", lilicorr="convolved", dtype=torch.float32)
    taps, table, head, anchor = CASES[0].inputs()
    expected, (first, _) = opened(draft, tmp_path / "a", taps, len(taps), 2)
    _, once, _ = walked(expected, [first], [anchor], 5, Tables(table, head))
    drafter, (slot, other) = opened(draft, tmp_path / "b", taps[:7], 7, 2)
    drafter.inject([other, slot], [2, 13], torch.cat([torch.randn(2, taps.shape[1]), taps[7:]]))
    drafter.inject([slot, other], [0, 3], torch.randn(3, taps.shape[1]))
    _, parts, _ = walked(drafter, [slot], [anchor], 5, Tables(table, head))
    assert parts.token_ids == once.token_ids
    drafter.release(slot)
    drafter.reserve(slot, [0, 1], 0)
    drafter.inject([slot], [20], taps)
    _, again, _ = walked(drafter, [slot], [anchor], 5, Tables(table, head))
    assert again.token_ids == once.token_ids


FAULTS = {
    "no anchor": ("context_proj.weight", lambda t: torch.zeros_like(t)),
    "slot bias reversed": ("relative_slot_bias", lambda t: t.flip(-1)),
    "same slot": ("same_slot_bias", lambda t: -t),
    "rank off by one": ("rank_embedding", lambda t: t.roll(1, -2)),
    "slot off by one": ("slot_embedding", lambda t: t.roll(1, 2)),
    "features": ("feature_mlp.up_proj.weight", lambda t: t.roll(1, 1)),
    "in for out": ("out_head.weight", lambda t: t.flip(0)),
    "norm": ("output_norm.weight", lambda t: torch.ones_like(t)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_part_moves_the_scores(fault: str, tmp_path: Path) -> None:
    """The golden values would see a fault in any of them."""
    case, draft = CASES[0], CASES[0].write(tmp_path / "draft")
    name, change = FAULTS[fault]
    tensors = load_file(draft / "model.safetensors")
    tensors[f"lilicorr.{name}"] = change(tensors[f"lilicorr.{name}"]).contiguous()
    save_file(tensors, draft / "model.safetensors")
    found = ours(case, draft, tmp_path / "engine")["scores"]
    assert np.abs(found - golden(case)["scores"]).max() > 100 * ATOL


K, k = SIZES.block_size - 1, TOP_K
RANKS, SLOTS = np.arange(k, dtype=np.float32)[:, None] / (k - 1), np.arange(K)
DISTANCES = SLOTS[:, None] - SLOTS + K


def changed(model: onnx.ModelProto, before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> onnx.ModelProto:
    """The graph with another constant."""
    (constant,) = (
        found for found in model.graph.initializer
        if not found.external_data and np.array_equal(onnx.numpy_helper.to_array(found), before)
    )  # fmt: skip
    constant.CopyFrom(onnx.numpy_helper.from_array(after.astype(before.dtype), constant.name))
    return model


GRAPH_FAULTS = {
    "rank feature off by one": (RANKS, np.roll(RANKS, 1)),
    "slot bias reversed": (DISTANCES, DISTANCES.T),
    "slot bias off by one": (DISTANCES, DISTANCES + 1),
    "every candidate best": ((RANKS == 0).astype(np.float32), np.ones_like(RANKS)),
}


@pytest.mark.parametrize("fault", GRAPH_FAULTS)
def test_faults_of_the_graph_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        engine_directory, "correlator_graph", lambda draft: changed(correlator_graph(draft), *GRAPH_FAULTS[fault])
    )
    found = ours(CASES[0], CASES[0].write(tmp_path / "draft"), tmp_path / "engine")["scores"]
    assert np.abs(found - golden(CASES[0])["scores"]).max() > 100 * ATOL


def after_the_wrong_token(drafter: Drafter, slots: Any, counts: Any, rows: torch.Tensor) -> None:
    KEEP_LAST(drafter, slots, counts, rows.roll(1, 0))


def among_the_candidates(scorer: LilicorrScorer, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top, ids = logits.topk(scorer.top_k)
    return ids, top.log_softmax(-1)


KEEP_LAST = Drafter._keep_last
READ_FAULTS = {
    "anchor of the wrong token": (Drafter, "_keep_last", after_the_wrong_token),
    "softmax over the candidates only": (LilicorrScorer, "from_logits", among_the_candidates),
}


@pytest.mark.parametrize("fault", READ_FAULTS)
def test_faults_of_what_it_reads_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*READ_FAULTS[fault])
    found = ours(CASES[-1], CASES[-1].write(tmp_path / "draft"), tmp_path / "engine")["scores"]
    assert np.abs(found - golden(CASES[-1])["scores"]).max() > 100 * ATOL
