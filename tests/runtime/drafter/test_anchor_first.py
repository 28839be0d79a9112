# SPDX-License-Identifier: Apache-2.0
"""DFlash drafts whose first row proposes, in z-lab's layout: DeepSeek's own code is the oracle, as it is of DSpark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from tests.checkpoint.samples import edit_config
from tests.oracle.deepspec_dspark import CASES, SIZES
from tests.runtime.drafter.test_dflash2 import DSPARK_KEYS, assert_same, dspark, golden

CASE = CASES[0]


def in_zlabs_layout(directory: Path, said: dict[str, Any]) -> Path:
    """DeepSpec's draft without heads, and `said`."""
    config = json.loads((CASE.write(directory) / "config.json").read_text())
    section = {key: config[key] for key in ("mask_token_id", "target_layer_ids")}
    gone = [*section, "markov_rank", "enable_confidence_head"]
    edit_config(directory, *gone, architectures=["DFlashDraftModel"], dflash_config=section)
    return edit_config(directory, **said)


@pytest.mark.parametrize("key", ["query_zero_predicts_next", "dflash_config__sample_from_anchor"])
def test_it_is_deepseeks(key: str, tmp_path: Path) -> None:
    draft = in_zlabs_layout(tmp_path / "draft", {key: True})
    assert read_draft(draft).dialect.name == "zlab"
    found = dspark(CASE, draft, tmp_path / "engine", rows=3)
    assert len(found["path"]) == SIZES.block_size
    assert_same(found, golden(CASE, DSPARK_KEYS))


def test_rows_shifted_by_one_would_show(tmp_path: Path) -> None:
    """Without the key, the draft proposes one token less, from the rows behind the first."""
    expected = golden(CASE, DSPARK_KEYS)["path"]
    found = dspark(CASE, in_zlabs_layout(tmp_path / "draft", {}), tmp_path / "engine", rows=3)["path"]
    assert np.array_equal(found, expected[1:])
