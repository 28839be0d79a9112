# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import build
from tests.paths import FIXTURES

TARGET = FIXTURES / "tiny-qwen3"


@pytest.fixture(scope="package")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dynamo") / "tiny"
    build(FIXTURES / "tiny-qwen3-dflash", directory, TARGET)
    return directory
