# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from tests.plugins.kernel import emulation


@pytest.fixture(scope="session", autouse=True)
def emulated_programs(pytestconfig: pytest.Config) -> None:
    """All workers share what is compiled, and later runs with the same sources."""
    emulation.shared = pytestconfig.cache.mkdir("emulated")
