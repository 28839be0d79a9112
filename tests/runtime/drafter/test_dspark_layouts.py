# SPDX-License-Identifier: Apache-2.0
"""DSpark with 1 + N blocks, windows, causal blocks and a smaller vocabulary, against equations in float64.

Hidden states are those of the float64 drafter; the path is walked here, from left to right, over its logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_spec import MARKOV_CANDIDATES
from tests.checkpoint.dialect_samples import add_random
from tests.checkpoint.samples import edit_config, edit_tensors
from tests.decoding import Tables
from tests.reference.dflash_float64 import AttentionRule, ReferenceDrafter
from tests.reference.synthetic import DraftSizes, write_random_draft
from tests.runtime.drafter.walks import opened, walked

SIZES = DraftSizes()
ANCHOR, NUM_CONTEXT, ROWS = 5, 20, 40
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 9}
BEHIND = {"query_zero_predicts_next": False}
FULL = AttentionRule(causal=False, window=None)
CAUSAL = AttentionRule(causal=True, window=None)
WINDOW = AttentionRule(causal=True, window=9)


@dataclass(frozen=True)
class Case:
    """Keys of config.json, and the expected computation."""

    name: str
    config: dict[str, Any]
    first_row: int
    rules: tuple[AttentionRule, ...] = (FULL,) * 3
    num_rows: int | None = None


CASES = (
    Case("1 + N", {"sample_from_anchor": False}, 1),
    Case("causal", {"is_causal": True}, 0, (CAUSAL,) * 3),
    Case("windows, 1 + N", {**SLIDING, "use_sliding_window": True, **BEHIND}, 1, (WINDOW, FULL, WINDOW)),
    Case("windows switched off", {**SLIDING, "use_sliding_window": False}, 0, (CAUSAL, FULL, CAUSAL)),
    Case("a smaller vocabulary", {"draft_vocab_size": ROWS}, 0, num_rows=ROWS),
    Case("a smaller vocabulary, 1 + N", {"draft_vocab_size": ROWS, **BEHIND}, 1, num_rows=ROWS),
)  # fmt: skip


def write(case: Case, directory: Path) -> Path:
    write_random_draft(directory, dialect="qwen3", dspark="vanilla", dtype=torch.float32, sizes=SIZES)
    rows = case.num_rows or SIZES.vocab_size
    add_random(
        directory, {"embed_tokens.weight": (SIZES.vocab_size, SIZES.hidden), "lm_head.weight": (rows, SIZES.hidden)}
    )
    if case.num_rows:
        tokens = torch.randperm(SIZES.vocab_size, generator=torch.Generator().manual_seed(5))[:rows].sort().values
        name = "markov_head.markov_w2.weight"
        edit_tensors(
            directory,
            lambda tensors: tensors.update({name: tensors[name][:rows].clone(), "d2t": tokens - torch.arange(rows)}),
        )
    return edit_config(directory, **case.config)


def equations(case: Case, directory: Path, taps: torch.Tensor) -> tuple[np.ndarray, list[int]]:
    """Hidden states [S, H], and the path of the proposing rows."""
    tensors = {name: tensor.double() for name, tensor in load_file(directory / "model.safetensors").items()}
    reference = ReferenceDrafter.load(directory, {"rules": list(case.rules)})
    S = SIZES.block_size
    noise = tensors["embed_tokens.weight"][[ANCHOR] + [SIZES.vocab_size - 1] * (S - 1)].numpy()
    context = reference.context_kv(taps.double().numpy(), np.arange(NUM_CONTEXT))
    hidden = reference.draft(noise, *context, np.arange(NUM_CONTEXT, NUM_CONTEXT + S))
    w1, w2 = (tensors[f"markov_head.markov_{w}.weight"].numpy() for w in ("w1", "w2"))
    offsets = load_file(directory / "model.safetensors").get("d2t", torch.zeros(len(w2), dtype=torch.int64)).numpy()
    path, before = list[int](), ANCHOR
    for logits in hidden[case.first_row :] @ tensors["lm_head.weight"].numpy().T:
        best = np.argsort(-logits)[:MARKOV_CANDIDATES]
        row = int(best[(logits + w2 @ w1[before])[best].argmax()])
        before = row + int(offsets[row])
        path.append(before)
    return hidden, path


def ours(directory: Path, work: Path, taps: torch.Tensor) -> tuple[np.ndarray, list[int]]:
    drafter, slots = opened(directory, work, taps, NUM_CONTEXT, rows=2)
    none = Tables(torch.empty(0), torch.empty(0))  # the draft has both of its own
    hidden, proposed, _ = walked(drafter, slots, [ANCHOR, 1], drafter.spec.num_draft_tokens, none)
    return hidden[0].numpy(), proposed.token_ids


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_is_what_the_equations_say(case: Case, tmp_path: Path) -> None:
    directory = write(case, tmp_path / "draft")
    taps = torch.randn(NUM_CONTEXT, SIZES.num_taps * SIZES.hidden, generator=torch.Generator().manual_seed(1))
    hidden, path = equations(case, directory, taps)
    found, proposed = ours(directory, tmp_path / "engine", taps)
    np.testing.assert_allclose(found, hidden, atol=1e-4 * np.abs(hidden).max(), rtol=0)
    assert proposed == path
    assert len(path) == SIZES.block_size - case.first_row
