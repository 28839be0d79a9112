# SPDX-License-Identifier: Apache-2.0
"""What no graph computes is refused by its name, before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.errors import BuildError
from dflash_trt.graph.unbuilt import refuse_unbuilt
from tests.paths import FIXTURES

SPEC = read_draft(Path(FIXTURES / "tiny-qwen3-dflash")).spec


@pytest.mark.parametrize(
    "facts",
    [
        {"biases": ("fc",)}, {"value_scale": 0.5}, {"tap_hidden_size": 8}, {"tap_norms": True},
        {"context_input_layernorm": True}, {"attention_gate": "per_head"},
    ],
    ids=lambda facts: next(iter(facts)),
)  # fmt: skip
def test_refused_by_name(facts: dict[str, Any]) -> None:
    refuse_unbuilt(SPEC)
    with pytest.raises(BuildError, match=f"^{next(iter(facts))}: "):
        refuse_unbuilt(msgspec.structs.replace(SPEC, **facts))
