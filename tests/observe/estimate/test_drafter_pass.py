# SPDX-License-Identifier: Apache-2.0
"""A drafter's pass by layers and formats: the step's own terms where all layers are alike, and what mixing changes."""

from __future__ import annotations

import msgspec
import pytest

from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.sizes import draft_sizes
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.drafter_pass import drafter_pass
from dflash_trt.observe.estimate.inputs import draft_shape, target_shape
from dflash_trt.observe.estimate.shapes import System
from dflash_trt.observe.estimate.step import Head, StepLoad, StepModel
from tools.recipe_tables import DRAFT, PAGE, TARGET, Setting, heads, replace_tables, tables, weight_bytes
from tools.recipe_tables import cost as cost_of

SPEC = published_drafts()[DRAFT].spec
RATES = rates("b300", "trtllm")


def test_the_page_is_in_step_with_the_code() -> None:
    """After a wanted change: python -m tools.recipe_tables"""
    page = PAGE.read_text()
    assert replace_tables(page) == page
    assert all(table in page for table in tables().values())


@pytest.mark.parametrize("algorithm", ["", "FP8", "NVFP4"])
@pytest.mark.parametrize("batch", [1, 64])
def test_alike_layers_cost_what_a_step_says(algorithm: str, batch: int) -> None:
    """Compares the drafter's terms, with every module but fc in one format and all drafts verified."""
    target = target_shape(TARGET)
    system = System(
        target=target, draft=draft_shape(DRAFT, algorithm), eagle3=None, gpu="b300", gpu_memory_bytes=0, num_gpus=1,
        tensor_parallel=1, expert_parallel=1, drafter_ranks=1, runtime="trtllm",
    )  # fmt: skip
    load = StepLoad(batch=batch, num_draft_tokens=SPEC.block_size - 1, context=1024)
    terms = [term for term in StepModel(system, RATES).price("dflash", load).terms if term.part == "drafter"]
    algorithms = {m: algorithm for m in SPEC.linear_modules() if m != "fc" and algorithm}
    ours = drafter_pass(SPEC, algorithms, RATES, load, Head(rows=target.vocab_size))
    assert [term.seconds for term in ours.terms] == pytest.approx([term.seconds for term in terms])
    assert [term.bytes for term in ours.terms] == pytest.approx([term.bytes for term in terms])


def test_what_shares_a_gemm_but_no_format_is_two_gemms() -> None:
    load = StepLoad(batch=1, num_draft_tokens=SPEC.block_size - 1, context=0)
    gate = {"layers.0.mlp.gate_proj": "FP8"}
    both = gate | {"layers.0.mlp.up_proj": "FP8"}
    dense, one, two = (drafter_pass(SPEC, algorithms, RATES, load).seconds for algorithms in ({}, gate, both))
    saved = SPEC.intermediate_size * SPEC.hidden_size / RATES.read_rate
    assert dense - one == pytest.approx(saved - RATES.gemm_seconds)
    assert dense - two == pytest.approx(2 * saved)


def test_weights_alone_save_reading_but_no_arithmetic() -> None:
    def seconds(recipe: str, batch: int) -> float:
        return cost_of(Setting(recipe=recipe, head=heads()["target"], batch=batch)).seconds

    assert seconds("nvfp4-w4a16", 1) == pytest.approx(seconds("nvfp4", 1))
    assert seconds("nvfp4-w4a16", 4096) == pytest.approx(seconds("bf16", 4096))
    assert seconds("nvfp4", 4096) < seconds("fp8", 4096) < seconds("bf16", 4096)


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
def test_weights_are_those_that_deployments_count(recipe: str) -> None:
    """K and V's, which a pass reads twice, once."""
    sizes = draft_sizes(DRAFT)
    assert sizes is not None
    algorithm = {"bf16": "", "fp8": "FP8", "nvfp4": "NVFP4"}[recipe]
    algorithms = {module: algorithm for module in SPEC.linear_modules() if module != "fc"}
    assert weight_bytes(recipe) == pytest.approx(sizes.weight_bytes(algorithms, 1))


def test_an_fp8_context_is_read_in_half_the_bytes() -> None:
    load = StepLoad(batch=1, num_draft_tokens=SPEC.block_size - 1, context=8192)
    passes = [drafter_pass(SPEC, {}, RATES, load, fp8_context=fp8).bytes for fp8 in (False, True)]
    assert passes[0] - passes[1] == 8192 * SPEC.context_bytes_per_token(fp8=True)


def test_convolutions_and_selector_are_priced() -> None:
    """z-lab/Qwen3.8-27B-DFlash2: ten projections of [1280, 5120] and 20 sides, and of the selector a projection of
    [256, 5120] and, for each draft, two codebooks' rows of 16 candidates.
    """
    spec = published_drafts()["z-lab/Qwen3.8-27B-DFlash2"].spec
    load = StepLoad(batch=3, num_draft_tokens=7, context=0)
    plain = msgspec.structs.replace(spec, block_conv=None, candidate_selector=None)
    with_both, without = (drafter_pass(each, {}, RATES, load) for each in (spec, plain))
    terms = {term.name: term for term in with_both.terms}
    convolutions, selector = terms["block convolutions"], terms["selector"]
    assert convolutions.bytes == 2 * 10 * 1280 * 5120
    busy = convolutions.bytes / RATES.read_rate
    assert convolutions.seconds == pytest.approx(10 * RATES.gemm_seconds + busy + 20 * RATES.small_kernel_seconds)
    assert selector.bytes == 2 * (256 * 5120 + 3 * 7 * 2 * 16 * 256)
    assert selector.seconds == pytest.approx(RATES.gemm_seconds + selector.bytes / RATES.read_rate)
    assert with_both.seconds - without.seconds == pytest.approx(convolutions.seconds + selector.seconds)
