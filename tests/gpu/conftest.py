# SPDX-License-Identifier: Apache-2.0
"""Fixtures of tests on a GPU that the kernels were compiled for. Without one, these tests fail instead of being
skipped.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from dflash_trt import _C
from tests.gpu.launches import EXPERIMENTAL_BUILD, takes, why_no_launch
from tests.plugins.cases import Case


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _why_no_launch()):
        pytest.fail(reason, pytrace=False)


_why_no_launch = cache(why_no_launch)


@pytest.fixture(autouse=True)
def fits_the_gpu_and_the_build(request: pytest.FixtureRequest) -> None:
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    case, kernel = params.get("case"), params.get("kernel", "best")
    if isinstance(case, Case) and not takes(case, torch.cuda.get_device_capability()):
        pytest.skip("needs a GPU of compute capability 8.9 or newer for an FP8 cache")
    if kernel not in _C.kv_injection_attention_kernels():
        pytest.skip(f"no GPU has run this kernel, so it is not compiled by default: {EXPERIMENTAL_BUILD}")
