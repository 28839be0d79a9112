# SPDX-License-Identifier: Apache-2.0
"""The instruction sets that kernels are chosen from are those that Linux names for this CPU."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

from dflash_trt import _C

CPUINFO = Path("/proc/cpuinfo")
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi"}


@pytest.mark.skipif(platform.machine() != "x86_64" or not CPUINFO.exists(), reason="kernels for x86, flags by Linux")
def test_the_best_kernels_that_the_cpu_runs() -> None:
    match = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    assert match
    flags = set(match[1].split())
    expected = [name for name, needed in (("avx512", AVX512), ("avx2", AVX2)) if needed <= flags]
    assert _C.cpu_features() == [*expected, "scalar"]
