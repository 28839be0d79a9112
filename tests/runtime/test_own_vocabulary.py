# SPDX-License-Identifier: Apache-2.0
"""Drafts with an embedding, a mask row or an lm_head of their own, reduced by d2t: every proposal against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import head_token_ids
from tests.checkpoint.samples import refusal
from tests.decoding import decode, greedy, open_without_tokenizer
from tests.featured import build_featured, featured_draft
from tests.fixtures_data import prompts
from tests.oracle.transformers_dflash import load_target
from tests.paths import FIXTURES
from tests.reference.decode_loop import reference_greedy

DRAFT, TARGET = FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3"
MASK, TOKENS = 1, 20
Tensors = dict[str, torch.Tensor]
Proposals = list[list[int]]


def embedding() -> torch.Tensor:
    return load_file(TARGET / "model.safetensors")["model.embed_tokens.weight"].bfloat16()


def reduced_head(num_rows: int = 300) -> tuple[Tensors, torch.Tensor]:
    """The target's head on some tokens, in no order; its d2t, and those tokens."""
    head = load_file(TARGET / "model.safetensors")["lm_head.weight"]
    tokens = torch.randperm(len(head), generator=torch.Generator().manual_seed(0))[:num_rows]
    return {"lm_head.weight": head[tokens].bfloat16(), "d2t": tokens - torch.arange(num_rows)}, tokens


def proposals(directory: Path, facts: dict[str, Any], tensors: Tensors) -> tuple[Proposals, Proposals]:
    """Ours with a draft of these facts, step by step, and those of the definition; both write the target's text."""
    build_featured(featured_draft(DRAFT, directory / "draft", facts, tensors), directory / "engine", TARGET)
    prompt = prompts(TARGET)[0]
    ours = decode(open_without_tokenizer(directory / "engine", TARGET), prompt, greedy(TOKENS))
    expected = reference_greedy(load_target(TARGET), directory / "draft", prompt, TOKENS)
    assert ours.token_ids == expected.output_ids
    assert [len(step.token_ids) for step in ours.steps] == expected.committed
    cut = [proposed[: step.proposed] for proposed, step in zip(expected.proposals, ours.steps, strict=True)]
    return [list(step.proposals) for step in ours.steps], cut


def test_own_reduced_head(tmp_path: Path) -> None:
    """Rows become the target's tokens before anybody sees them."""
    tensors, tokens = reduced_head()
    ours, expected = proposals(tmp_path, {"draft_vocab_size": len(tokens)}, tensors)
    assert ours == expected
    assert {token for proposed in ours for token in proposed} <= set(tokens.tolist())
    assert max(token for proposed in ours for token in proposed) >= len(tokens), "d2t left out would look the same"


def test_own_embedding_and_head_are_not_the_targets(tmp_path: Path) -> None:
    """Both random in part, so that the target's in their place would propose something else."""
    noise = torch.randn(embedding().shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    tensors = {"embed_tokens.weight": embedding() + 0.5 * noise, "lm_head.weight": noise}
    ours, expected = proposals(tmp_path / "own", {"own_embedding": True, "draft_vocab_size": 1024}, tensors)
    borrowed, _ = proposals(tmp_path / "borrowed", {}, {})
    embedded, _ = proposals(tmp_path / "embedded", {"own_embedding": True}, {"embed_tokens.weight": noise})
    assert ours == expected
    assert ours[0] != borrowed[0] != embedded[0]


@pytest.mark.parametrize("facts", [{}, pytest.param({"own_embedding": True}, marks=pytest.mark.full)], ids=str)
def test_own_mask_row(facts: dict[str, Any], tmp_path: Path) -> None:
    """MiMo's vector stands for the mask token only, whoever's the other rows are."""
    row = torch.randn(128, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours, expected = proposals(tmp_path / "row", {**facts, "mask_embedding": True}, {"mask_embedding": row})
    without, _ = proposals(tmp_path / "without", facts, {})
    assert ours == expected
    assert ours[0] != without[0]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({0: -1}, "found 0 + -1"),
        ({3: 1021}, "found 3 + 1021"),
        ({5: 2**62}, f"found 5 + {2**62}"),
        ({1: 5, 2: 4}, "expected each token in one row, found 6 in 3"),
    ],
)
def test_a_wrong_d2t_is_refused(change: dict[int, int], problem: str, tmp_path: Path) -> None:
    offsets = torch.zeros(10, dtype=torch.int64)
    for row, offset in change.items():
        offsets[row] = offset
    draft = featured_draft(DRAFT, tmp_path / "draft", {"draft_vocab_size": 10}, {"d2t": offsets})
    assert problem in refusal(lambda: head_token_ids(draft.spec, draft.weights))
