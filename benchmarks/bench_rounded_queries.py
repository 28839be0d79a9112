# SPDX-License-Identifier: Apache-2.0
"""Measures the error of the sm_90a attention, which rounds queries to E4M3 for the keys of an FP8 cache.

A kv head's queries of a request are multiplied by the power of two that makes their largest element 128 to 256, and
rounded. Prints how far the outputs of random rows are moved, beside what the cache's own rounding does. Asserts
nothing, needs no GPU.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from dflash_trt.cli.output import print_table
from tests.plugins.cases import BF16, FP8, GPT_OSS, QWEN3_8B, Case
from tests.plugins.kernel.oracle import expect
from tests.plugins.tensors import draw


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def error_row(case: Case) -> list[str]:
    """Error of the outputs for random rows, as a root mean square in percent of the outputs', by what is rounded."""
    tensors = draw(case)
    unrounded = replace(case, cache_dtype=BF16, k_scale=1.0, v_scale=1.0)
    exact = expect(unrounded, draw(unrounded)).output
    cached = expect(case, tensors).output
    both = expect(case, tensors, rounded_queries=True).output
    shares = (100 * rms(moved) / rms(exact) for moved in (cached - exact, both - cached, both - exact))
    return [case.name, f"{case.norm}", *(f"{share:.2f}" for share in shares)]


def main() -> None:
    cases = [
        replace(drafter, context_lengths=(2048,), cache_dtype=FP8, k_scale=0.02, v_scale=0.03, norm=norm)
        for drafter in (GPT_OSS, QWEN3_8B)
        for norm in (0.5, 1.0, 2.0, 4.0)
    ]
    columns = ["drafter", "norm", "FP8 cache", "rounded queries", "both"]
    print_table("Errors of outputs, % of their root mean square", columns, map(error_row, cases))


if __name__ == "__main__":
    main()
