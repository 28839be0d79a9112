# SPDX-License-Identifier: Apache-2.0
"""The drafter whole on every GPU, and shared: what serve-config and estimate print of both."""

from __future__ import annotations

import json
import re

import pytest

from dflash_trt.deploy.schema import Runtime
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.drafter_pass import DrafterOnRanks, drafters_on_ranks, preferred
from dflash_trt.observe.estimate.inputs import open_system
from dflash_trt.observe.estimate.step import StepLoad, StepModel
from tests.cli.commands import run

ENGINE, NATIVE = "gpt-oss-120b.b300x8.nvfp4", "gpt-oss-120b.b300x8.latency"
WHOLE = "whole"
"""ENGINE with a drafter on every GPU."""


STEP = StepLoad(batch=64, num_draft_tokens=9, context=16384)


def both(name: str, context: float) -> tuple[DrafterOnRanks, DrafterOnRanks]:
    changes = {"num_ranks": 1} if name == WHOLE else {}
    _, system = open_system(ENGINE if name == WHOLE else name, "trtllm", None, None, **changes)
    assert system.memory is not None
    whole, shared = drafters_on_ranks(system.memory, context)
    return whole, shared


@pytest.mark.parametrize(("name", "deployed"), [(ENGINE, 8), (WHOLE, 1), (NATIVE, 8)])
def test_what_is_deployed(name: str, deployed: int) -> None:
    for each in both(name, 1024):
        assert each.is_deployed == (each.ranks == deployed)


def test_sharing_divides_layers_and_context_but_not_the_tap_projection() -> None:
    whole, shared = both(ENGINE, 1024)
    assert whole.context_bytes == 8 * shared.context_bytes == 32768 * 8 * 2 * 8 * 64 * 2  # L, K and V, G, D, BF16
    assert whole.weight_bytes / 8 < shared.weight_bytes < whole.weight_bytes / 3


def test_all_reduces_cost_more_than_sharing_saves_until_there_is_context() -> None:
    """NVFP4 weights of one request are read faster than sixteen all-reduces are done; 64 contexts are not."""
    whole, shared = both(ENGINE, 1024)
    assert whole.seconds[1] < shared.seconds[1]
    whole, shared = both(ENGINE, 16384)
    assert whole.seconds[64] > 2 * shared.seconds[64]


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss-120b.b300x8.nvfp4", "gpt-oss-120b.b300x8.throughput-nvfp4", "gpt-oss-120b.b200x8.nvfp4",
        "gpt-oss-120b.b200x8.throughput-nvfp4", "gpt-oss-120b.h200x8.fp8",
    ],
)  # fmt: skip
def test_sharing_costs_little_where_it_loses_and_saves_much_where_it_wins(name: str) -> None:
    for context in (1024, 8192):
        drafters = both(name, context)
        whole, shared = drafters
        assert preferred(drafters) is shared
        assert all(shared.seconds[batch] < 1.1 * whole.seconds[batch] for batch in whole.seconds)


def test_a_whole_drafter_where_sharing_costs_more_than_it_saves() -> None:
    """On two GPUs, with short contexts."""
    drafters = both("qwen3-coder-next.b200x2.latency", 1024)
    assert preferred(drafters).ranks == 1


@pytest.mark.parametrize(("runtime", "is_fp8"), [("trtllm", False), ("vllm", True)])
def test_the_context_is_priced_by_its_own_dtype(runtime: Runtime, is_fp8: bool) -> None:
    """TensorRT-LLM's worker keeps it in BF16 whatever the target's cache is."""
    systems = [open_system(NATIVE, runtime, None, None, kv_cache_dtype=dtype)[1] for dtype in ("auto", "fp8")]
    loads = [system.memory for system in systems]
    seconds = [drafters_on_ranks(load, 16384)[1].seconds[64] for load in loads if load is not None]
    assert (seconds[1] < seconds[0]) == is_fp8
    context = [
        {term.name: term.bytes for term in StepModel(system, rates("b300", runtime)).price("dflash", STEP).terms}
        for system in systems
    ]
    assert (context[1]["attention, context"] < context[0]["attention, context"]) == is_fp8
    assert context[1]["attention, KV cache"] < context[0]["attention, KV cache"]


def test_one_gpu_shares_nothing() -> None:
    _, system = open_system("gpt-oss-20b.b200x1.nvfp4", "trtllm", None, None)
    assert system.memory is not None
    assert drafters_on_ranks(system.memory, 1024) == []


def test_both_are_printed() -> None:
    said = run("serve-config", ENGINE, "--runtime", "trtllm").stderr
    line = r"weights on each GPU: 0\.\d\d GiB whole; 0\.\d\d GiB shared by 8 GPUs \(as deployed\)"
    assert re.search(line, said), said
    document = json.loads(run("estimate", ENGINE, "--tau", "4.7", "--json").stdout)
    assert [each["ranks"] for each in document["drafters"]] == [1, 8]
    assert "shared by 8 GPUs" in run("estimate", ENGINE, "--tau", "4.7").stdout
