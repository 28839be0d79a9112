# SPDX-License-Identifier: Apache-2.0
"""A draft's attention on a CPU: the compiled operator beside the same in ONNX Runtime's own operators.

CPU time of one thread, the median of calls in turns; before each, other data pass through the caches, as a target does
between two drafts. ONNX Runtime's operators choose the best instructions of the machine themselves. Prints a table,
asserts nothing; a minute.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt import _C
from dflash_trt.cli.output import print_table
from dflash_trt.files.processor import cpu_model
from tests.plugins.cases import Case
from tests.plugins.onnx_node import feeds_of, session
from tests.plugins.tensors import draw

COLD_BYTES = 24 * 2**20
CALLS = 30
TINY = partial(Case, S=8, N=4, G=2, D=64, L=3)
QWEN3_SMALL = partial(Case, S=16, N=16, G=8, D=128, L=2)
GPT_OSS = partial(Case, S=10, N=64, G=8, D=64, L=2, sinks=True)
CASES = [
    TINY(name="fixture, 1 x 300", context_lengths=(300,)),
    TINY(name="fixture, 16 x 300", context_lengths=(300,) * 16),
    QWEN3_SMALL(name="Qwen3-0.6B, 1 x 300", context_lengths=(300,)),
    QWEN3_SMALL(name="Qwen3-0.6B, 4 x 1000", context_lengths=(1000,) * 4),
    GPT_OSS(name="gpt-oss, 1 x 2000", context_lengths=(2000,)),
    GPT_OSS(name="gpt-oss, window 128", context_lengths=(2000,), window=128),
]


def row(case: Case) -> list[str]:
    """Milliseconds of each way."""
    feeds = {
        name: np.nan_to_num(value) for name, value in feeds_of(case, draw(case)).items()
    }  # a mask does not stop a NaN
    sessions = [session(case, feeds, isa) for isa in _C.cpu_features()]
    times: list[list[float]] = [[] for _ in sessions]
    cold = torch.zeros(COLD_BYTES // 4)
    for _ in range(CALLS):
        for taken, way in zip(times, sessions, strict=True):
            cold.add_(1)
            begin = time.thread_time()
            way.run(None, feeds)
            taken.append(time.thread_time() - begin)
    return [case.name, *(f"{1e3 * statistics.median(taken):.2f}" for taken in times)]


def main() -> None:
    torch.set_num_threads(1)
    columns = ["attention of one layer", *_C.cpu_features()]
    print_table(f"ms of CPU time, one thread, {cpu_model()}", columns, [row(case) for case in CASES])


if __name__ == "__main__":
    main()
