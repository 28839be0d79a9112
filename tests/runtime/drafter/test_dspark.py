# SPDX-License-Identifier: Apache-2.0
"""DSpark: hidden states, paths and confidences are those of DeepSeek's own code."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.drafter.proposals import Draw, Proposals
from tests.engines import build
from tests.oracle.deepspec_dspark import ANCHOR, CASES, SIZES, Case, run
from tests.paths import REPOSITORY

Arrays = dict[str, np.ndarray[Any, Any]]
VECTORS = REPOSITORY / "tests" / "golden" / "dspark" / "vectors.npz"
ATOL = 1e-4


def golden(case: Case) -> Arrays:
    with np.load(VECTORS) as vectors:
        return {key: vectors[f"{case.name}/{key}"] for key in ("hidden", "path", "scores", "survival")}


def ours(case: Case, draft: Path, work: Path, *, rows: int = 1, draws: tuple[Draw | None, ...] = ()) -> Arrays:
    """Our drafter's walk; with more `rows`, in a batch of blocks with other contexts around it.

    A draft without a vocabulary borrows that of the case's own.
    """
    drafter = open_drafter(work, build(draft, work), num_slots=rows)
    tensors = load_file(replace_vocabulary(case, work / "whole") / "model.safetensors")
    table, head = tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    taps = case.taps()
    slots, lengths = list(range(rows)), [case.num_context, *(3 * row for row in range(1, rows))]
    for slot in slots:
        drafter.reserve(slot, [2 * slot, 2 * slot + 1], 0)
    drafter.inject(slots, lengths, torch.cat([taps, *(torch.randn(n, taps.shape[1]) for n in lengths[1:])]))
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


def replace_vocabulary(case: Case, directory: Path) -> Path:
    """A copy of the draft with embedding and head of its own."""
    return Case(case.name, case.head, case.num_context).write(directory)


def assert_same(found: Arrays, expected: Arrays) -> None:
    np.testing.assert_allclose(found["hidden"], expected["hidden"], atol=ATOL, rtol=ATOL)
    np.testing.assert_array_equal(found["path"], expected["path"])
    np.testing.assert_allclose(found["scores"], expected["scores"], atol=ATOL, rtol=ATOL)
    np.testing.assert_allclose(found["survival"], expected["survival"], atol=ATOL)


@pytest.mark.parametrize("own_vocabulary", [True, False])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_deepseeks(case: Case, own_vocabulary: bool, tmp_path: Path) -> None:
    """With the whole draft, and with one whose embedding and head are the target's."""
    stored = Case(case.name, case.head, case.num_context, case.num_tokens, own_vocabulary)
    found = ours(case, stored.write(tmp_path / "draft"), tmp_path / "engine", rows=3 if own_vocabulary else 1)
    assert_same(found, golden(case))


@pytest.mark.full
@pytest.mark.skipif(find_spec("deepspec") is None, reason="a checkout of deepseek-ai/DeepSpec in PYTHONPATH")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_deepspec_still_says_so(case: Case, tmp_path: Path) -> None:
    assert_same(run(case, tmp_path / "draft"), golden(case))


@pytest.mark.parametrize(
    "tensor", ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "markov_head.gate_proj.bias"]
)
def test_each_tensor_counts(tensor: str, tmp_path: Path) -> None:
    file = CASES[2].write(tmp_path / "draft") / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {tensor: tensors[tensor].flip(0).contiguous()}, file)
    with pytest.raises(AssertionError):
        assert_same(ours(CASES[2], file.parent, tmp_path / "engine"), golden(CASES[2]))


def test_a_drawn_path_survives_as_its_own_tokens_say(tmp_path: Path) -> None:
    """The first slot's confidence is the anchor's, whatever is drawn; the next follow what was drawn."""
    case, expected = CASES[1], golden(CASES[1])
    draw = Draw(SamplingParams(temperature=5.0, seed=3).sampler(), position=0)
    drawn = ours(case, case.write(tmp_path / "draft"), tmp_path / "engine", draws=(draw,))
    assert drawn["path"].tolist() != expected["path"].tolist()
    np.testing.assert_allclose(drawn["survival"][0], expected["survival"][0], atol=ATOL)
    same = int((drawn["path"] == expected["path"]).argmin()) + 1
    assert abs(drawn["survival"][same] - expected["survival"][same]) > ATOL
