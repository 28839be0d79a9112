# SPDX-License-Identifier: Apache-2.0
"""What every test here needs: a GPU that the kernels were compiled for. Who asks for these tests asks for one."""

from __future__ import annotations

import pytest

from tests.gpu.launches import why_no_launch


@pytest.fixture(autouse=True, scope="session")
def kernels() -> None:
    if reason := why_no_launch():
        pytest.fail(reason, pytrace=False)
