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
from safetensors.torch import load_file

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.proposals import Draw
from dflash_trt.runtime.session import run as run_requests
from tests.checkpoint.samples import edit_config
from tests.decoding import Tables, open_trained
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
from tests.runtime.drafter.walks import opened, walked


def dspark(case: DSparkCase, draft: Path, work: Path, *, rows: int = 1, draws: tuple[Draw | None, ...] = ()) -> Arrays:
    """Our drafter's walk; with more `rows`, in a batch of blocks with other contexts around it.

    A draft without a vocabulary borrows that of the case's own.
    """
    drafter, slots = opened(draft, work, case.taps(), case.num_context, rows)
    tensors = load_file(replace_vocabulary(case, work / "whole") / "model.safetensors")
    table, head = tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    anchors = [ANCHOR, *range(1, rows)]
    hidden, proposed, lattice = walked(drafter, slots, anchors, case.num_tokens, Tables(table, head), draws)
    if lattice is not None:
        scores = lattice.greedy_rows()[0].amax(-1)
    else:
        scores = (hidden[0, : case.num_tokens] @ head.T).amax(-1)
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


def ours(case: Case, draft: Path, work: Path, *, rows: int = 1) -> Arrays:
    """Our drafter's walk; with more `rows`, in a batch of blocks with other contexts around it."""
    taps, table, head, anchor = case.inputs()
    drafter, slots = opened(draft, work, taps, case.num_context, rows)
    anchors = [anchor, *range(1, rows)]
    hidden, proposed, lattice = walked(drafter, slots, anchors, case.num_tokens, Tables(table, head))
    assert lattice is not None
    return {
        "hidden": hidden[0].numpy(),
        "ids": lattice.ids[0].sort(-1).values.numpy(),
        "path": np.array(proposed.token_ids),
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
    session = open_trained("tiny-qwen3", tmp_path / "engine", max_batch_size=4)
    params = SamplingParams(max_tokens=STEPS_TOKENS + block_size, ignore_eos=True)
    requests = [session.request(prompt, params) for prompt in prompts(session)[:count]]
    run_requests(session.decoder(), requests)
    steps = [until_enough([len(step.token_ids) for step in request.steps]) for request in requests]
    assert steps == golden_steps(block_size)[:count]


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
