# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over calls of every kernel, head_dim and cache format, and over a decode, each in its own process.

Run as a program with a tool's name, this file makes those calls; with `decode` after it, it decodes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch

from dflash_trt import _C
from dflash_trt.device.launcher import CudaLauncher, CurrentStreamLauncher
from dflash_trt.runtime.session import run
from tests.decoding import greedy, open_trained
from tests.fixtures_data import prompts
from tests.gpu.launches import Launch, moved, takes
from tests.gpu.test_append import append
from tests.paths import REPOSITORY
from tests.plugins.cases import CORNER, FEATURES, MANY_ROWS_FP8, OUT_OF_RANGE, PAGED, Case
from tests.plugins.tensors import BAD, Tensors, draw, out_of_range
from tests.plugins.test_append import CASES as APPENDS

pytestmark = pytest.mark.gpu

NAMES = {
    *(f"D{D}-{dtype}{cache}" for D in (64, 96, 128, 256) for dtype in ("bf16", "f16") for cache in ("", "-fp8")),
    *("window7-causal-sinks", "N40-G8-S7", "N32-G2-S32", "no-context", "full-cache", "one-long", "odd"),
    *("pages-16-V1-bf16", "pages-64-V2-fp8", "pages-64-window-65", "pages-many-rows"),
}
CASES = [case for case in (*FEATURES, *CORNER, *PAGED) if case.name in NAMES]
DONE = "every call was made"
OPTIONS = [
    *("--kernel-name", "kns=kv_injection"),  # racecheck warns of hazards in other kernels, too
    *("--report-api-errors", "no"),  # torch asks the driver for functions that it may lack; ours raise in Python
    *("--error-exitcode", "99"),
]
# With more than two warps racecheck may report hazards that do not exist: plugins/README.md.
TWO_WARPS = {name for name in NAMES if name.startswith(("D64", "D128", "D256"))}


@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    sanitize(tool)


@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_it_finds_nothing_in_a_decode(tool: str) -> None:
    sanitize(tool, "decode")


def sanitize(tool: str, *arguments: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer: install it with the CUDA toolkit and add its bin to PATH")
    # Without torch's pool an access beyond a tensor is an access beyond an allocation; no kernel is torch.compile's.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "TORCHDYNAMO_DISABLE": "1"}
    command = [sanitizer, "--tool", tool, *OPTIONS, sys.executable, "-m", __name__, tool, *arguments]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert DONE in result.stdout


def calls(capability: tuple[int, int], compiled: Sequence[str]) -> list[tuple[Case, Tensors, str]]:
    """Case, inputs and kernel of each; the FP8 kernel of warpgroup instructions is for compute capability 9.0 alone."""
    bad = [(name, values[2]) for name, values in BAD.items()]
    many_rows = [(case, kernel) for case in MANY_ROWS_FP8 for kernel in ("mma", "wgmma", "ahead")]
    made = [
        *((case, draw(case), "best") for case in CASES if takes(case, capability)),
        *((case, draw(case), "short") for case in CASES if takes(case, capability) and case.D in (64, 128)),
        *((case, out_of_range(draw(case), *value), "best")
          for case in OUT_OF_RANGE if takes(case, capability) for value in bad),
        *((case, draw(case), kernel) for case, kernel in many_rows if capability == (9, 0)),
    ]  # fmt: skip
    return [call for call in made if call[2] in compiled]


def make_calls(tool: str) -> None:
    for case, tensors, kernel in calls(torch.cuda.get_device_capability(), _C.kv_injection_attention_kernels()):
        if tool == "racecheck" and case.name not in TWO_WARPS:
            continue
        Launch(case, moved(tensors, "cuda"), kernel=kernel).run()  # drawn on the CPU, so that few other kernels run
    for rows in APPENDS:
        append(rows, [torch.zeros(rows.cache_shape, dtype=rows.dtype, device="cuda") for _ in "kv"])


def decode(device: str = "cuda", name: str = "tiny-gpt-oss", num_tokens: int = 12) -> None:
    """Two prompts at once, launched kernel by kernel: graphs would take memory from a pool."""
    CudaLauncher.record = CurrentStreamLauncher.record  # type: ignore[assignment, method-assign]
    session = open_trained(name, device=device, executor="torch", max_batch_size=2)
    answers = run(session.decoder(), [session.request(prompt, greedy(num_tokens)) for prompt in prompts(session)[:2]])
    assert [len(answer.token_ids) for answer in answers] == [num_tokens] * 2
    assert sum(answer.steps for answer in answers) < 2 * num_tokens - 2  # some drafts held


if __name__ == "__main__":
    decode() if sys.argv[2:] else make_calls(sys.argv[1])
    print(DONE)
