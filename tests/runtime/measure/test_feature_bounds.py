# SPDX-License-Identifier: Apache-2.0
"""Bounds from the weights hold for drafts with features that z-lab's v1 drafts do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.quantize.bounds import ranges_from_weights
from tests.engine.graph.test_features import CASES, Case
from tests.featured import featured_draft
from tests.reference.dflash_float64 import ReferenceDrafter
from tests.reference.synthetic import write_random_draft

CHOSEN = [c for c in CASES if c.name in ("biases of q and v, fc and MLP", "Laguna", "MiMo", "partial rotary 4 gpt_oss")]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_no_input_exceeds_its_bound(case: Case, tmp_path: Path) -> None:
    """Over rows that point where weight rows point, and random ones; fc has no bound."""
    draft = featured_draft(write_random_draft(tmp_path / "base", dialect=case.dialect), tmp_path / "draft", case.facts)
    ranges, spec = ranges_from_weights(draft), draft.spec
    reference = ReferenceDrafter.load(tmp_path / "draft", case.reference)
    seen: dict[str, float] = {}

    class Recording(ReferenceDrafter):
        def linear(self, name: str, x: Any) -> Any:
            seen[name] = max(seen.get(name, 0.0), float(np.abs(x).max()))
            return super().linear(name, x)

    recording = Recording(**{name: getattr(reference, name) for name in reference.__dataclass_fields__})
    rng, H, S = np.random.default_rng(0), spec.hidden_size, spec.block_size
    v_weight = reference.tensors["layers.0.self_attn.v_proj.weight"]
    rows = np.concatenate([v_weight, 100 * np.eye(H), 10 * rng.normal(size=(64, H))])
    taps = rows @ np.linalg.pinv(reference.tensors["fc.weight"]).T
    k, v = recording.context_kv(taps, np.arange(len(rows)))
    for begin in range(0, len(rows) - S, S):
        recording.draft(rows[begin : begin + S], k, v, np.arange(len(rows), len(rows) + S))
    assert seen.keys() - {"fc"} == ranges.inputs.keys()
    for module, bound in ranges.inputs.items():
        assert seen[module] <= bound * (1 + 1e-6), module
    assert (np.abs(k).max(axis=(0, 2, 3)) <= np.array(ranges.k) * (1 + 1e-6)).all()
    assert (np.abs(v).max(axis=(0, 2, 3)) <= np.array(ranges.v) * (1 + 1e-6)).all()
    assert np.abs(k[:, 0]).max() > 0.3 * ranges.k[0]  # and none is far from what occurs
    assert np.abs(v[:, 0]).max() > 0.3 * ranges.v[0]
