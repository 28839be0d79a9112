# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os

import pytest

from tests.plugins.kernel import emulation


@pytest.fixture(scope="session", autouse=True)
def emulated_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All workers of this run share what is compiled."""
    base = tmp_path_factory.getbasetemp()
    emulation.shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
