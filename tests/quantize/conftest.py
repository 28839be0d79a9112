# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures_data import PAIRS
from tests.quantize.feature_samples import capture


@pytest.fixture(scope="session")
def features(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three prompts answered with 40 tokens each, captured once from both fixture targets."""
    directory = tmp_path_factory.mktemp("features")
    options = ("--max-prompts", 3, "--max-new-tokens", 40)
    return {name: capture(name, directory / f"{name}.safetensors", *options) for name in PAIRS}
