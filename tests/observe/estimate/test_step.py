# SPDX-License-Identifier: Apache-2.0
"""What the cost of a step must stand, whatever the constants; and what follows by hand from gpt-oss-120b's sizes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.observe.estimate.constants import constants, rates
from dflash_trt.observe.estimate.experts import inclusion, measured_kernel, power_law, skew, touched
from dflash_trt.observe.estimate.shapes import METHODS, Method
from dflash_trt.observe.estimate.step import StepLoad, StepModel
from tests.observe.estimate.systems import DENSE, ENGINE, MOE, NAMES, model_of, system_of

NAME = st.sampled_from(NAMES)
METHOD = st.sampled_from(METHODS)
BATCH = st.integers(1, 512)
CONTEXT = st.integers(1, 100_000)
PROMPT = st.integers(0, 8192)
EXAMPLES = settings(max_examples=60, deadline=None)


def load(batch: int, num_draft_tokens: int, context: int, prompt: int = 0) -> StepLoad:
    return StepLoad(batch=batch, num_draft_tokens=num_draft_tokens, context=context, prompt_tokens=prompt)


@EXAMPLES
@given(NAME, METHOD, BATCH, st.integers(0, 5), CONTEXT, PROMPT, st.floats(1.01, 4))
def test_more_bandwidth_is_never_slower(
    name: str, method: Method, batch: int, k: int, context: int, prompt: int, factor: float
) -> None:
    model = model_of(name)
    faster = model_of(name, hbm_bandwidth=model.rates.hbm_bandwidth * factor)
    at = load(batch, k, context, prompt)
    assert faster.price(method, at).seconds <= model.price(method, at).seconds


@EXAMPLES
@given(NAME, METHOD, BATCH, st.integers(0, 4), CONTEXT, PROMPT)
def test_longer_blocks_never_read_fewer_bytes_nor_take_less_time(
    name: str, method: Method, batch: int, k: int, context: int, prompt: int
) -> None:
    model = model_of(name)
    short, long = (model.price(method, load(batch, length, context, prompt)) for length in (k, k + 1))
    assert long.bytes >= short.bytes
    if k:  # from 0 to 1 the host's part changes too
        assert long.seconds >= short.seconds


@EXAMPLES
@given(NAME, METHOD, BATCH, st.integers(0, 5), CONTEXT, PROMPT)
def test_no_step_beats_the_memory_roof(
    name: str, method: Method, batch: int, k: int, context: int, prompt: int
) -> None:
    model = model_of(name)
    cost = model.price(method, load(batch, k, context, prompt))
    for term in cost.terms:
        assert term.seconds >= term.bytes / model.rates.hbm_bandwidth * (1 - 1e-9), term


@EXAMPLES
@given(NAME, METHOD, st.integers(1, 500), st.integers(0, 5), CONTEXT)
def test_more_work_never_takes_less_time(name: str, method: Method, batch: int, k: int, context: int) -> None:
    model = model_of(name)
    base = model.price(method, load(batch, k, context)).seconds
    assert model.price(method, load(batch + 1, k, context)).seconds >= base
    assert model.price(method, load(batch, k, context + 1000)).seconds >= base
    assert model.price(method, load(batch, k, context, 512)).seconds >= base


@EXAMPLES
@given(st.integers(0, 200), st.floats(0, 2))
def test_touched_experts(tokens: int, exponent: float) -> None:
    probabilities = power_law(128, 4, exponent)
    assert sum(probabilities) == pytest.approx(4)
    assert max(probabilities) <= 1
    count = touched(probabilities, tokens)
    assert count <= min(128, 4 * tokens) + 1e-6
    assert count <= touched(power_law(128, 4, 0.0), tokens) + 1e-6  # uniform routing touches most


def test_uniform_routing_by_hand() -> None:
    """128 (1 - (124 / 128)^10) = 34.8 experts for 10 tokens."""
    assert touched(power_law(128, 4, 0.0), 10) == pytest.approx(34.8, abs=0.05)
    assert touched(inclusion([1.0] * 4 + [0.0] * 124, 4), 10) == 4


def test_plain_bytes_by_hand() -> None:
    """gpt-oss-120b, one token: experts 1.90 GB, attention 1.91, lm_head 1.16 and 36,864 B of KV for a token of context
    in full layers; divided by 8 ranks."""
    cost = model_of(MOE).price("none", load(1, 0, 4096))
    full, sliding = 36_864 * 4096, 36_864 * 128
    assert cost.bytes * 8 == pytest.approx(1.90e9 + 1.91e9 + 1.158e9 + full + sliding, rel=0.005)


def test_verified_bytes_grow_with_touched_experts() -> None:
    """Uniform routing, 10 tokens: 34.8 experts a layer are 16.5 GB."""
    model = model_of(MOE, routing_exponent=0.0)
    terms = {term.name: term for term in model.price("dflash", load(1, 9, 1)).terms if term.part == "target"}
    assert terms["experts"].bytes * 8 == pytest.approx(16.5e9, rel=0.01)


def test_measured_kernel_is_used_where_there_is_one() -> None:
    """AIConfigurator's table: 17.3 us a layer at 4 experts, B300, TP 8."""
    terms = {term.name: term for term in model_of(MOE).price("none", load(1, 0, 1)).terms}
    assert terms["experts"].seconds == pytest.approx(36 * 17.3e-6, rel=1e-6)


def test_measured_routing_is_believed() -> None:
    system = system_of(MOE)
    rates = model_of(MOE).rates
    narrow = StepModel(system, rates, inclusion([1.0] * 8 + [0.0] * 120, 4))
    assert narrow.touched_experts(1000) == pytest.approx(8)
    at = load(16, 9, 1000)
    assert narrow.price("dflash", at).seconds < model_of(MOE).price("dflash", at).seconds


def test_replicated_drafter_has_no_all_reduce_and_reads_all_of_itself() -> None:
    alone = msgspec.structs.replace(system_of(ENGINE), drafter_ranks=1)
    models = model_of(MOE), StepModel(alone, rates(alone.gpu, alone.runtime))
    shared, whole = (model.price("dflash", load(1, 9, 1000)) for model in models)
    names = [{term.name for term in cost.terms} for cost in (shared, whole)]
    assert ["drafter's all-reduces" in found for found in names] == [True, False]
    layers = [next(t for t in cost.terms if t.name == "layers").bytes for cost in (shared, whole)]
    assert layers[1] / layers[0] == pytest.approx(8 * 4.5 / 16, rel=0.01)  # NVFP4 on every GPU against BF16 / 8


def test_engine_mode_computes_the_whole_block() -> None:
    """Layers of three drafts take as long as those of nine."""
    model = model_of(ENGINE)
    layers = [
        next(t for t in model.price("dflash", load(64, k, 1000)).terms if t.name == "layers").seconds for k in (3, 9)
    ]
    assert layers[0] == layers[1]


def test_one_gpu_has_no_communication() -> None:
    assert not [t for t in model_of(DENSE).price("dflash", load(4, 9, 1000)).terms if t.part == "communication"]


def test_a_step_of_prompts_alone_runs_no_drafter() -> None:
    model = model_of(MOE)
    assert model.price("dflash", load(0, 9, 100, 1000)) == model.price("none", load(0, 0, 100, 1000))


def test_each_prompt_that_joins_costs_the_host_its_admission() -> None:
    at = msgspec.structs.replace(load(4, 9, 100, 1000), prompts=3)
    steps = [model_of(MOE, host_prompt_seconds=each).price("dflash", at).seconds for each in (0.0, 1e-3)]
    assert steps[1] - steps[0] == pytest.approx(3e-3)


def test_prompts_attend_to_themselves_alone() -> None:
    """Two prompts of 4,096 tokens cost less attention than one of 8,192, however they are cut into steps."""
    at = load(0, 0, 1, 8192)
    one, two = (
        {t.name: t for t in model_of(MOE).price("none", msgspec.structs.replace(at, prompts=n)).terms} for n in (1, 2)
    )
    assert two["attention, KV cache"].seconds < one["attention, KV cache"].seconds
    assert two["experts"] == one["experts"]


def test_attention_by_data_parallelism() -> None:
    """A rank reads all of attention's weights for its own half of the requests; experts stay divided."""
    shared = msgspec.structs.replace(system_of(MOE), tensor_parallel=2, expert_parallel=2, drafter_ranks=1)
    apart = msgspec.structs.replace(shared, attention_dp=True)
    together, own = (
        {t.name: t for t in StepModel(s, rates("b300", "trtllm")).price("none", load(8, 0, 100)).terms}
        for s in (shared, apart)
    )
    assert own["attention projections"].bytes == 2 * together["attention projections"].bytes
    assert own["lm_head"].bytes == 2 * together["lm_head"].bytes
    assert own["attention, KV cache"].bytes == together["attention, KV cache"].bytes  # half of the requests, all heads
    assert own["experts"] == together["experts"]
    assert own["all-reduces"].seconds == pytest.approx(together["all-reduces"].seconds / 2)


def test_popular_experts_cost_tiles_of_their_own() -> None:
    """H200, vLLM's table: 8,192 tokens take 2,905 us balanced, 4,021 under the power law of 1.2."""
    target = msgspec.structs.replace(system_of(MOE), gpu="h200", tensor_parallel=1, runtime="vllm").target
    kernel = measured_kernel("h200", target, 1, "vllm")
    assert kernel is not None
    law, uniform = (power_law(128, 4, exponent) for exponent in (1.2, 0.0))
    assert (skew(law), skew(uniform)) == pytest.approx((1.0, 0.0))
    assert kernel.seconds(128, 8192, 0.0) == pytest.approx(2905.2e-6)
    assert kernel.seconds(128, 8192, 1.0) == pytest.approx(4021e-6, rel=1e-3)
    served = measured_kernel("h200", target, 1, "trtllm")
    assert served is not None
    assert served.runtime == "trtllm 1.3.0rc20"


def test_no_drafts_is_plain_decoding() -> None:
    model = model_of(MOE)
    assert model.price("dflash", load(4, 0, 100)) == model.price("none", load(4, 0, 100))


@pytest.mark.parametrize("name", sorted(constants().kernels))
def test_every_constant_matters(name: str) -> None:
    """A constant that changes no price is not one of the model's."""
    prices = set()
    for value in (0.9, 1.1):
        changed = []
        for deployment, parallel in ((MOE, {"expert_parallel": 8}), (ENGINE, {}), (DENSE, {"gpu": "rtxpro6000"})):
            base = model_of(deployment)
            target = base.system.target
            if not parallel and target.num_experts:  # a shape without a measured table
                target = msgspec.structs.replace(target, top_k=3)
            system = msgspec.structs.replace(base.system, target=target, **parallel)
            rates = msgspec.structs.replace(base.rates, **{name: getattr(base.rates, name) * value})
            for at in (load(1, 5, 1000), load(512, 5, 1000), load(1, 5, 1000, 4096)):
                changed.append(StepModel(system, rates).price("dflash", at).seconds)
        prices.add(tuple(changed))
    assert len(prices) == 2
