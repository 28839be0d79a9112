# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over calls of every head_dim and cache format, in a process of their own.

Run as a program, this file makes those calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.gpu.launches import Launch, moved
from tests.paths import REPOSITORY
from tests.plugins.cases import CORNER, FEATURES
from tests.plugins.tensors import draw

pytestmark = pytest.mark.gpu

NAMES = {
    *(f"D{D}-{dtype}{cache}" for D in (64, 96, 128, 256) for dtype in ("bf16", "f16") for cache in ("", "-fp8")),
    *("window7-causal-sinks", "N40-G8-S7", "N32-G2-S32", "no-context", "full-cache", "one-long", "odd"),
}
CASES = [case for case in (*FEATURES, *CORNER) if case.name in NAMES]
FOUND = 99


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer: install it with the CUDA toolkit and add its bin to PATH")
    # Without torch's pool an access beyond a tensor is an access beyond an allocation.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), sys.executable, "-m", __name__]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert f"{len(CASES)} calls" in result.stdout


def main() -> None:
    for case in CASES:
        Launch(case, moved(draw(case), "cuda")).run()  # drawn on the CPU, so that few other kernels run
    print(f"{len(CASES)} calls")


if __name__ == "__main__":
    main()
