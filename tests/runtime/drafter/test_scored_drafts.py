# SPDX-License-Identifier: Apache-2.0
"""DFlash2, DSpark and LiLiCorr: hidden states, candidates, paths and confidences are those of their authors' code."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.engine.proposals import Draw
from dflash_trt.runtime.session import run as run_requests
from tests.checkpoint.samples import edit_config
from tests.decoding import Tables, open_trained
from tests.engines import build
from tests.fixtures_data import prompts
from tests.oracle import deepspec_dspark, vllm_lilicorr, zlab_dflash2
from tests.oracle.zlab_dflash2 import BLOCK_SIZES, STEPS_PROMPTS, STEPS_TOKENS, until_enough, verify_steps
from tests.paths import FIXTURES, REPOSITORY
from tests.reference.synthetic import write_random_draft
from tests.runtime.drafter.walks import opened, walked

Arrays = dict[str, np.ndarray[Any, Any]]
TARGET = FIXTURES / "tiny-qwen3"
GOLDEN = REPOSITORY / "tests" / "golden"
ATOL = 1e-4


class Oracle(NamedTuple):
    """Code that made golden values: its cases, the values that are compared, and where it is found."""

    cases: tuple[Any, ...]
    keys: tuple[str, ...]
    run: Callable[[Any, Path], Arrays]
    module: str
    source: str


ORACLES = {
    "dflash2": Oracle(
        zlab_dflash2.CASES, ("hidden", "ids", "path"), zlab_dflash2.run,
        "dflash", "z-lab's package: pip install --no-deps dflash==0.1.0",
    ),
    "dspark": Oracle(
        deepspec_dspark.CASES, ("hidden", "path", "scores", "survival"), deepspec_dspark.run,
        "deepspec", "a checkout of deepseek-ai/DeepSpec in PYTHONPATH",
    ),
    "lilicorr": Oracle(
        vllm_lilicorr.CASES, ("hidden", "ids", "scores", "path"), vllm_lilicorr.run,
        "vllm", "vLLM's lilicorr.py in PYTHONPATH: tests/oracle/vllm_lilicorr.py",
    ),
}  # fmt: skip
CASES = [pytest.param(kind, case, id=f"{kind}, {case.name}") for kind in ORACLES for case in ORACLES[kind].cases]
each_case = pytest.mark.parametrize(("kind", "case"), CASES)
DSPARK_CASES = deepspec_dspark.CASES


def golden(kind: str, case: Any) -> Arrays:
    with np.load(GOLDEN / kind / "vectors.npz") as vectors:
        return {key: vectors[f"{case.name}/{key}"] for key in ORACLES[kind].keys}


def inputs(case: Any, work: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Taps [T, A*H], embedding and lm_head [V, H] of a target, and the anchor.

    A DSpark draft without a vocabulary borrows that of the case's own.
    """
    if not isinstance(case, deepspec_dspark.Case):
        taps, table, head, anchor = case.inputs()
        return taps, table, head, anchor
    whole = deepspec_dspark.Case(case.name, case.head, case.num_context).write(work / "whole")
    tensors = load_file(whole / "model.safetensors")
    return case.taps(), tensors["embed_tokens.weight"], tensors["lm_head.weight"], deepspec_dspark.ANCHOR


def ours(case: Any, draft: Path, work: Path, *, rows: int = 3, draws: tuple[Draw | None, ...] = ()) -> Arrays:
    """Our drafter's walk; with more `rows` than one, in a batch of blocks with other contexts around it."""
    taps, table, head, anchor = inputs(case, work)
    drafter, slots = opened(draft, work / "engine", taps, case.num_context, rows)
    anchors, target = [anchor, *range(1, rows)], Tables(table, head)
    hidden, proposed, lattice = walked(drafter, slots, anchors, case.num_tokens, target, draws)
    found = {"hidden": hidden[0], "path": torch.tensor(proposed.token_ids)}
    if isinstance(case, deepspec_dspark.Case):
        logits = hidden[0, : case.num_tokens] @ head.T if lattice is None else lattice.greedy_rows()[0]
        found |= {"scores": logits.amax(-1), "survival": torch.tensor(proposed.survival or ())}
    elif lattice is not None:
        ids = lattice.ids[0]  # DFlash2 has them in any order
        found |= {"ids": ids.sort(-1).values if drafter.spec.lilicorr is None else ids, "scores": lattice.scores[0]}
    return {name: values.numpy() for name, values in found.items()}


def assert_same(found: Arrays, expected: Arrays) -> None:
    for key, values in expected.items():
        exact = values.dtype.kind == "i"
        np.testing.assert_allclose(
            found[key], values, atol=0 if exact else ATOL, rtol=0 if exact or key == "survival" else ATOL, err_msg=key
        )


@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.full), 3])
@each_case
def test_it_is_its_authors(kind: str, case: Any, rows: int, tmp_path: Path) -> None:
    assert_same(ours(case, case.write(tmp_path / "draft"), tmp_path, rows=rows), golden(kind, case))


@pytest.mark.full
@each_case
def test_the_oracle_still_says_so(kind: str, case: Any, tmp_path: Path) -> None:
    if find_spec(ORACLES[kind].module) is None:
        pytest.skip(ORACLES[kind].source)
    assert_same(ORACLES[kind].run(case, tmp_path / "draft"), golden(kind, case))


@pytest.mark.parametrize("case", DSPARK_CASES, ids=lambda case: case.name)
def test_a_dspark_draft_borrows_the_targets_vocabulary(case: deepspec_dspark.Case, tmp_path: Path) -> None:
    stored = deepspec_dspark.Case(case.name, case.head, case.num_context, case.num_tokens, own_vocabulary=False)
    assert_same(ours(case, stored.write(tmp_path / "draft"), tmp_path, rows=1), golden("dspark", case))


def test_a_drawn_path_survives_as_its_own_tokens_say(tmp_path: Path) -> None:
    """The first slot's confidence is the anchor's, whatever is drawn; the next follow what was drawn."""
    case, expected = DSPARK_CASES[1], golden("dspark", DSPARK_CASES[1])
    draw = Draw(SamplingParams(temperature=5.0, seed=3).sampler(), position=0)
    drawn = ours(case, case.write(tmp_path / "draft"), tmp_path, rows=1, draws=(draw,))
    assert drawn["path"].tolist() != expected["path"].tolist()
    np.testing.assert_allclose(drawn["survival"][0], expected["survival"][0], atol=ATOL)
    same = int((drawn["path"] == expected["path"]).argmin()) + 1
    assert abs(drawn["survival"][same] - expected["survival"][same]) > ATOL


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
    found = ours(DSPARK_CASES[0], draft, tmp_path)
    assert len(found["path"]) == deepspec_dspark.SIZES.block_size
    assert_same(found, golden("dspark", DSPARK_CASES[0]))


def golden_steps(block_size: int) -> list[list[int]]:
    steps: list[list[int]] = json.loads((GOLDEN / "dflash2" / "steps.json").read_text())[str(block_size)]
    return steps


@pytest.mark.full
@pytest.mark.skipif(find_spec("dflash") is None, reason=ORACLES["dflash2"].source)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_zlabs_package_still_takes_these_steps(block_size: int) -> None:
    assert verify_steps(block_size) == golden_steps(block_size)


@pytest.mark.parametrize(
    ("block_size", "count"), [(8, 4), *(pytest.param(n, STEPS_PROMPTS, marks=pytest.mark.full) for n in (4, 8))]
)
def test_zlabs_loop_takes_the_same_steps(block_size: int, count: int, tmp_path: Path) -> None:
    """With a shorter block, too, all of whose rows are run: position 0 of the convolution is each block's own."""
    draft = copytree(FIXTURES / "tiny-qwen3-dflash2", tmp_path / "draft")
    build(edit_config(draft, dflash_config__block_size=block_size), tmp_path / "engine", TARGET)
    session = open_trained(TARGET.name, tmp_path / "engine", max_batch_size=4)
    params = SamplingParams(max_tokens=STEPS_TOKENS + block_size, ignore_eos=True)
    requests = [session.request(prompt, params) for prompt in prompts(session)[:count]]
    run_requests(session.decoder(), requests)
    steps = [until_enough([len(step.token_ids) for step in request.steps]) for request in requests]
    assert steps == golden_steps(block_size)[:count]


def test_the_last_context_row_is_each_slots_own(tmp_path: Path) -> None:
    """LiLiCorr reads it: after several calls, some without rows for a slot, and after a slot was emptied."""
    draft = write_random_draft(tmp_path / "draft", dialect="qwen3", lilicorr="convolved", dtype=torch.float32)
    taps, table, head, anchor = vllm_lilicorr.CASES[0].inputs()
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
