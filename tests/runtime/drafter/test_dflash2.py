# SPDX-License-Identifier: Apache-2.0
"""DFlash2 and DSpark: hidden states, candidates, paths and confidences are those of z-lab's and DeepSeek's own code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.candidate_lattice import Candidates
from dflash_trt.engine.candidate_selector import CandidateSelector
from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.load import open_session
from dflash_trt.runtime.session import run as run_requests
from tests.checkpoint.samples import edit_config
from tests.engines import build
from tests.fixtures_data import prompts
from tests.oracle.deepspec_dspark import ANCHOR, SIZES
from tests.oracle.deepspec_dspark import CASES as DSPARK_CASES
from tests.oracle.deepspec_dspark import Case as DSparkCase
from tests.oracle.deepspec_dspark import run as run_dspark
from tests.oracle.zlab_dflash2 import (
    BLOCK_SIZES,
    CASES,
    STEPS_PROMPTS,
    STEPS_TOKENS,
    Case,
    run,
    until_enough,
    verify_steps,
)
from tests.paths import FIXTURES, REPOSITORY


def dspark(case: DSparkCase, draft: Path, work: Path, *, rows: int = 1, draws: tuple[Draw | None, ...] = ()) -> Arrays:
    """Our drafter's walk; with more `rows`, in a batch of blocks with other contexts around it.

    A draft without a vocabulary borrows that of the case's own.
    """
    drafter, slots = opened(draft, work, case.taps(), case.num_context, rows)
    tensors = load_file(replace_vocabulary(case, work / "whole") / "model.safetensors")
    table, head = tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    anchors = torch.tensor([ANCHOR, *range(1, rows)])
    noise = drafter.embedding.blocks(anchors, SIZES.block_size, lambda ids: table[ids]).clone()
    hidden = drafter.draft(slots, noise)
    if case.head != "none":
        lattice = drafter.candidates(slots, noise, anchors, case.num_tokens, lambda rows: rows @ head.T)
        proposed, scores = lattice.walk(draws or [None] * rows)[0], lattice.greedy_rows()[0].amax(-1)
    else:
        scores, best = (hidden[0, : case.num_tokens] @ head.T).max(-1)
        has_head = drafter.spec.has_own_head
        proposed = Proposals((drafter.propose(slots, noise)[0] if has_head else best)[: case.num_tokens].tolist())
    return {
        "hidden": hidden[0].numpy(),
        "path": np.array(proposed.token_ids),
        "scores": scores.numpy(),
        "survival": np.array(proposed.survival or ()),
    }


def replace_vocabulary(case: DSparkCase, directory: Path) -> Path:
    """A copy of the draft with embedding and head of its own."""
    return DSparkCase(case.name, case.head, case.num_context).write(directory)


@pytest.mark.parametrize("own_vocabulary", [True, False])
@pytest.mark.parametrize("case", DSPARK_CASES, ids=lambda case: case.name)
def test_it_is_deepseeks(case: DSparkCase, own_vocabulary: bool, tmp_path: Path) -> None:
    """With the whole draft, and with one whose embedding and head are the target's."""
    stored = DSparkCase(case.name, case.head, case.num_context, case.num_tokens, own_vocabulary)
    found = dspark(case, stored.write(tmp_path / "draft"), tmp_path / "engine", rows=3 if own_vocabulary else 1)
    assert_same(found, golden(case, DSPARK_KEYS))


@pytest.mark.full
@pytest.mark.skipif(find_spec("deepspec") is None, reason="a checkout of deepseek-ai/DeepSpec in PYTHONPATH")
@pytest.mark.parametrize("case", DSPARK_CASES, ids=lambda case: case.name)
def test_deepspec_still_says_so(case: DSparkCase, tmp_path: Path) -> None:
    assert_same(run_dspark(case, tmp_path / "draft"), golden(case, DSPARK_KEYS))


def test_a_drawn_path_survives_as_its_own_tokens_say(tmp_path: Path) -> None:
    """The first slot's confidence is the anchor's, whatever is drawn; the next follow what was drawn."""
    case, expected = DSPARK_CASES[1], golden(DSPARK_CASES[1], DSPARK_KEYS)
    draw = Draw(SamplingParams(temperature=5.0, seed=3).sampler(), position=0)
    drawn = dspark(case, case.write(tmp_path / "draft"), tmp_path / "engine", draws=(draw,))
    assert drawn["path"].tolist() != expected["path"].tolist()
    np.testing.assert_allclose(drawn["survival"][0], expected["survival"][0], atol=ATOL)
    same = int((drawn["path"] == expected["path"]).argmin()) + 1
    assert abs(drawn["survival"][same] - expected["survival"][same]) > ATOL


Arrays = dict[str, np.ndarray[Any, Any]]
TARGET = FIXTURES / "tiny-qwen3"
GOLDEN = REPOSITORY / "tests" / "golden"
ATOL = 1e-4
DFLASH2_KEYS, DSPARK_KEYS = ("hidden", "ids", "path"), ("hidden", "path", "scores", "survival")


def golden(case: Case | DSparkCase, keys: Sequence[str] = DFLASH2_KEYS) -> Arrays:
    with np.load(GOLDEN / ("dflash2" if keys is DFLASH2_KEYS else "dspark") / "vectors.npz") as vectors:
        return {key: vectors[f"{case.name}/{key}"] for key in keys}


def golden_steps(block_size: int) -> list[list[int]]:
    steps: list[list[int]] = json.loads((GOLDEN / "dflash2" / "steps.json").read_text())[str(block_size)]
    return steps


def opened(draft: Path, work: Path, taps: torch.Tensor, num_context: int, rows: int) -> tuple[Drafter, list[int]]:
    """Our drafter with the context injected; with more `rows`, beside other contexts. And the slots of all."""
    drafter = open_drafter(work, build(draft, work), num_slots=rows)
    slots, lengths = list(range(rows)), [num_context, *(3 * row for row in range(1, rows))]
    for slot in slots:
        drafter.reserve(slot, [2 * slot, 2 * slot + 1], 0)
    drafter.inject(slots, lengths, torch.cat([taps, *(torch.randn(n, taps.shape[1]) for n in lengths[1:])]))
    return drafter, slots


def ours(case: Case, draft: Path, work: Path, *, rows: int = 1) -> Arrays:
    """Our drafter's walk; with more `rows`, in a batch of blocks with other contexts around it."""
    taps, table, head, anchor = case.inputs()
    drafter, slots = opened(draft, work, taps, case.num_context, rows)
    anchors = torch.tensor([anchor, *range(1, rows)])
    noise = drafter.embedding.blocks(anchors, case.block_size, lambda ids: table[ids]).clone()
    lattice = drafter.candidates(slots, noise, anchors, case.num_tokens, lambda hidden: hidden @ head.T)
    hidden = drafter.draft(slots, noise)
    return {
        "hidden": hidden[0].numpy(),
        "ids": lattice.ids[0].sort(-1).values.numpy(),
        "path": lattice.greedy_walk()[0].numpy(),
    }


def assert_same(found: Arrays, expected: Arrays) -> None:
    np.testing.assert_allclose(found["hidden"], expected["hidden"], atol=ATOL, rtol=ATOL)
    np.testing.assert_array_equal(found["path"], expected["path"])
    for key in expected.keys() - {"hidden", "path"}:
        np.testing.assert_allclose(found[key], expected[key], atol=ATOL, rtol=ATOL if key == "scores" else 0)


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_zlabs(case: Case, rows: int, tmp_path: Path) -> None:
    assert_same(ours(case, case.write(tmp_path / "draft"), tmp_path / "engine", rows=rows), golden(case))


@pytest.mark.full
@pytest.mark.skipif(find_spec("dflash") is None, reason="z-lab's package: pip install --no-deps dflash==0.1.0")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_package_still_says_so(case: Case, tmp_path: Path) -> None:
    assert_same(run(case, tmp_path / "draft"), golden(case))


@pytest.mark.full
@pytest.mark.skipif(find_spec("dflash") is None, reason="z-lab's package: pip install --no-deps dflash==0.1.0")
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_package_still_takes_these_steps(block_size: int) -> None:
    assert verify_steps(block_size) == golden_steps(block_size)


@pytest.mark.parametrize(
    ("block_size", "count"), [(8, 4), *(pytest.param(n, STEPS_PROMPTS, marks=pytest.mark.full) for n in (4, 8))]
)
def test_its_loop_takes_the_same_steps(block_size: int, count: int, tmp_path: Path) -> None:
    """With a shorter block, too, all of whose rows are run: position 0 of the convolution is each block's own."""
    draft = copytree(FIXTURES / "tiny-qwen3-dflash2", tmp_path / "draft")
    build(edit_config(draft, dflash_config__block_size=block_size), tmp_path / "engine", TARGET)
    session = open_session(tmp_path / "engine", str(TARGET), RuntimeOptions(max_batch_size=4))
    params = SamplingParams(max_tokens=STEPS_TOKENS + block_size, ignore_eos=True)
    requests = [session.request(prompt, params) for prompt in prompts(session)[:count]]
    run_requests(session.decoder(), requests)
    steps = [until_enough([len(step.token_ids) for step in request.steps]) for request in requests]
    assert steps == golden_steps(block_size)[:count]


def test_the_walk_draws_behind_what_it_drew() -> None:
    """Every number on a fine grid, so that shares are the probabilities."""
    count, generator = 4000, torch.Generator().manual_seed(0)
    lattice = Candidates(
        torch.tensor([[[10, 11, 12], [20, 21, 22]]]).expand(count, -1, -1),
        torch.randn(1, 2, 3, 3, generator=generator).expand(count, -1, -1, -1),
    )
    grid = (torch.arange(count) + 0.5) / count
    temperatures = torch.full((count,), 0.8, dtype=torch.float64)
    for drawn_first in (0, 1, 2):
        first = lattice.scores[0, 0, 0].double().div(0.8).softmax(-1)
        u = first[:drawn_first].sum() + 0.5 * first[drawn_first]
        paths, q = lattice.sampled_walk(temperatures, torch.stack([u.expand(count), grid], dim=1))
        second = lattice.scores[0, 1, drawn_first].double().div(0.8).softmax(-1)
        torch.testing.assert_close(q[0], torch.stack([first, second]))
        assert set(paths[:, 0].tolist()) == {10 + drawn_first}
        torch.testing.assert_close(paths[:, 1].sub(20).bincount() / count, second.float(), atol=1e-3, rtol=0)


def test_logits_are_multiplied_and_then_capped(tmp_path: Path) -> None:
    """By 0.7 near 0, at 3 far from it: a path seldom depends on it."""
    selector = CandidateSelector(read_draft(CASES[3].write(tmp_path)).spec, *torch.zeros(3, 1, 1))
    logits = selector.final_logits(torch.tensor([-1e3, -1e-3, 1e-3, 1e3]))
    torch.testing.assert_close(logits, torch.tensor([-3.0, -0.7e-3, 0.7e-3, 3.0]))


def in_zlabs_layout(directory: Path, said: dict[str, Any]) -> Path:
    """DeepSpec's draft without heads, and `said`."""
    config = json.loads((DSPARK_CASES[0].write(directory) / "config.json").read_text())
    section = {key: config[key] for key in ("mask_token_id", "target_layer_ids")}
    gone = [*section, "markov_rank", "enable_confidence_head"]
    edit_config(directory, *gone, architectures=["DFlashDraftModel"], dflash_config=section)
    return edit_config(directory, **said)


@pytest.mark.parametrize("key", ["query_zero_predicts_next", "dflash_config__sample_from_anchor"])
def test_anchor_first_drafts_of_zlab_are_deepseeks(key: str, tmp_path: Path) -> None:
    draft = in_zlabs_layout(tmp_path / "draft", {key: True})
    assert read_draft(draft).dialect.name == "zlab"
    found = dspark(DSPARK_CASES[0], draft, tmp_path / "engine", rows=3)
    assert len(found["path"]) == SIZES.block_size
    assert_same(found, golden(DSPARK_CASES[0], DSPARK_KEYS))


@pytest.mark.parametrize("scores", [float("nan"), float("inf"), float("-inf"), 1e38])
def test_a_broken_draft_draws_from_a_distribution(scores: float) -> None:
    lattice = Candidates(torch.arange(6).view(1, 2, 3), torch.full((1, 2, 3, 3), scores))
    _, q = lattice.sampled_walk(torch.tensor([1e-30]), torch.tensor([[0.5, 1 - 2**-53]], dtype=torch.float64))
    torch.testing.assert_close(q.sum(-1), torch.ones(1, 2, dtype=torch.float64))
