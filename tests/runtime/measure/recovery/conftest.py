# SPDX-License-Identifier: Apache-2.0
"""Features for a LiLiCorr draft: those of the same target, with its embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.paths import FIXTURES
from tests.runtime.measure.feature_samples import Facts, Tensors, edit


def _add_embedding(tensors: Tensors, facts: Facts) -> None:
    tensors["embed_tokens"] = load_file(FIXTURES / "tiny-qwen3" / "model.safetensors")["model.embed_tokens.weight"]
    facts["has_embedding"] = True


@pytest.fixture(scope="session")
def features(features: dict[str, Path]) -> dict[str, Path]:
    file = features["tiny-qwen3"]
    return features | {"tiny-qwen3-lilicorr": edit(file, file.with_stem("tiny-qwen3-lilicorr"), _add_embedding)}
