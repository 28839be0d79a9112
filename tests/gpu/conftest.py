# SPDX-License-Identifier: Apache-2.0
"""What every test here needs: a GPU that the kernels were compiled for. Who asks for these tests asks for one."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.launches import takes, why_no_launch
from tests.plugins.cases import Case


@pytest.fixture(autouse=True, scope="session")
def kernels() -> None:
    if reason := why_no_launch():
        pytest.fail(reason, pytrace=False)


@pytest.fixture(autouse=True)
def format_of_the_gpu(request: pytest.FixtureRequest, kernels: None) -> None:
    case = request.node.callspec.params.get("case") if hasattr(request.node, "callspec") else None
    if isinstance(case, Case) and not takes(case, torch.cuda.get_device_capability()):
        pytest.skip("needs a GPU of compute capability 8.9 or newer for an FP8 cache")
