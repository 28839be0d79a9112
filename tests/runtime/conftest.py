# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from dflash_trt.runtime.session import Session
from tests.engines import build
from tests.fixtures_data import PAIRS
from tests.paths import FIXTURES


@pytest.fixture(scope="package")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Session]:
    """Both trained pairs, built and loaded once."""
    opened = {}
    for name in PAIRS:
        engine = tmp_path_factory.mktemp(name) / "engine"
        build(FIXTURES / f"{name}-dflash", engine, FIXTURES / name)
        opened[name] = Session.open(engine, str(FIXTURES / name))
    return opened
