# SPDX-License-Identifier: Apache-2.0
"""What TensorRT's parser and builder ask of graphs with features that z-lab's v1 drafts do not have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.contract.builder_model import problems
from tests.contract.onnx_operators import RELEASES
from tests.featured import build_featured, featured_draft
from tests.paths import FIXTURES
from tests.runtime.test_own_vocabulary import reduced_head

FEATURES: dict[str, dict[str, Any]] = {
    "own head": {"draft_vocab_size": 1024, "own_embedding": True},
    "reduced head": {"draft_vocab_size": 300},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_the_builder_takes_it(feature: str, tmp_path: Path) -> None:
    tensors = reduced_head()[0] if feature == "reduced head" else {}
    draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", tmp_path / "draft", FEATURES[feature], tensors)
    build_featured(draft, tmp_path / "engine")
    for name in ("context", "draft"):
        model = onnx.load(tmp_path / "engine" / f"{name}.onnx", load_external_data=False)
        for release in RELEASES:
            assert problems(model, release, tmp_path / "engine") == []
