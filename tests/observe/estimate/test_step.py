# SPDX-License-Identifier: Apache-2.0
"""Costs of a step and of a drafter's pass: properties that hold for any constants.

Costs by hand from gpt-oss-120b's sizes, with the drafter whole on every GPU, and shared.
"""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.deploy.published import published_drafts
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.sizes import draft_sizes
from dflash_trt.errors import BuildError
from dflash_trt.observe.estimate.constants import constants, rates
from dflash_trt.observe.estimate.drafter_pass import PLAN, DrafterOnRanks, drafter_pass, drafters_on_ranks
from dflash_trt.observe.estimate.drafter_terms import Head
from dflash_trt.observe.estimate.expert_routing import inclusion, power_law, skew, touched
from dflash_trt.observe.estimate.inputs import open_system, target_shape
from dflash_trt.observe.estimate.kernel_times import measured_kernel
from dflash_trt.observe.estimate.shapes import METHODS, Method, System
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.estimate.step_cost import StepLoad
from tests.cli.commands import run
from tests.observe.estimate.systems import B300, DENSE, ENGINE, MOE, NAMES, model_of, system_of
from tools.estimate_tables import draft_shape
from tools.recipe_tables import DRAFT, PAGE, TARGET, Setting, heads, replace_tables, tables, weight_bytes
from tools.recipe_tables import cost as cost_of

WHOLE = "whole"
"""ENGINE with a drafter on every GPU."""


STEP = StepLoad(batch=64, num_draft_tokens=9, context=16384)


def both(name: str, context: float) -> tuple[DrafterOnRanks, DrafterOnRanks]:
    changes = {"num_ranks": 1} if name == WHOLE else {}
    _, system = open_system(ENGINE if name == WHOLE else name, "trtllm", None, None, **changes)
    whole, shared = drafters_on_ranks(system, context)
    return whole, shared


@pytest.mark.parametrize(("name", "deployed"), [(ENGINE, 8), (WHOLE, 1), (MOE, 8)])
def test_what_is_deployed(name: str, deployed: int) -> None:
    for each in both(name, 1024):
        assert each.is_deployed == (each.ranks == deployed)


def test_what_sharing_saves_and_costs() -> None:
    whole, shared = both(ENGINE, 1024)
    assert whole.context_bytes == 8 * shared.context_bytes == 32768 * 8 * 2 * 8 * 64 * 2  # L, K and V, G, D, BF16
    assert whole.weight_bytes / 8 < shared.weight_bytes < whole.weight_bytes / 3
    # NVFP4 weights of one request are read faster than sixteen all-reduces are done; 64 contexts are not
    whole, shared = both(ENGINE, 1024)
    assert whole.seconds[1] < shared.seconds[1]
    whole, shared = both(ENGINE, 16384)
    assert whole.seconds[64] > 2 * shared.seconds[64]
    _, system = open_system("gpt-oss-20b.b200x1.nvfp4", "trtllm", None, None)
    assert drafters_on_ranks(system, 1024) == []


@pytest.mark.parametrize(
    "name",
    [
        "gpt-oss-120b.b300x8.nvfp4", "gpt-oss-120b.b300x8.throughput-nvfp4", "gpt-oss-120b.b200x8.nvfp4",
        "gpt-oss-120b.b200x8.throughput-nvfp4", "gpt-oss-120b.h200x8.fp8",
    ],
)  # fmt: skip
def test_sharing_costs_little_where_it_loses_and_saves_much_where_it_wins(name: str) -> None:
    for context in (1024, 8192):
        whole, shared = both(name, context)
        assert all(shared.seconds[batch] < 1.1 * whole.seconds[batch] for batch in whole.seconds)
        assert shared.seconds[max(whole.seconds)] < 0.9 * whole.seconds[max(whole.seconds)]


@pytest.mark.parametrize(("runtime", "is_fp8"), [("trtllm", False), ("vllm", True)])
def test_the_context_is_priced_by_its_own_dtype(runtime: Runtime, is_fp8: bool) -> None:
    """TensorRT-LLM's worker keeps it in BF16 whatever the target's cache is."""
    systems = [open_system(MOE, runtime, None, None, kv_cache_dtype=dtype)[1] for dtype in ("auto", "fp8")]
    seconds = [drafters_on_ranks(system, 16384)[1].seconds[64] for system in systems]
    assert (seconds[1] < seconds[0]) == is_fp8
    context = [
        {term.name: term.bytes for term in StepModel(system, rates(B300, runtime)).price("dflash", STEP).terms}
        for system in systems
    ]
    assert (context[1]["attention, context"] < context[0]["attention, context"]) == is_fp8
    assert context[1]["attention, KV cache"] < context[0]["attention, KV cache"]


def test_both_are_printed() -> None:
    said = run("serve-config", ENGINE, "--runtime", "trtllm").stderr
    line = r"weights on each GPU: 0\.\d\d GiB whole; 0\.\d\d GiB shared by 8 GPUs \(as deployed\)"
    assert re.search(line, said), said


SPEC = published_drafts()[DRAFT].spec
RATES = rates(B300, "trtllm")


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
        target=target, draft=draft_shape(DRAFT, algorithm, PLAN), eagle3=None, gpu=B300, gpu_memory_bytes=0,
        num_gpus=1, tensor_parallel=1, expert_parallel=1, drafter_ranks=1, runtime="trtllm",
    )  # fmt: skip
    load = StepLoad(batch=batch, num_draft_tokens=SPEC.block_size - 1, context=1024)
    terms = [term for term in StepModel(system, RATES).price("dflash", load).terms if term.part == "drafter"]
    algorithms = {m: algorithm for m in SPEC.linear_modules() if m != "fc" and algorithm}
    ours = drafter_pass(SPEC, algorithms, RATES, load, Head(rows=target.vocab_size))
    assert [term.seconds for term in ours.terms] == pytest.approx([term.seconds for term in terms])
    assert [term.bytes for term in ours.terms] == pytest.approx([term.bytes for term in terms])


def test_formats_by_hand() -> None:
    load = StepLoad(batch=1, num_draft_tokens=SPEC.block_size - 1, context=0)
    gate = {"layers.0.mlp.gate_proj": "FP8"}
    both = gate | {"layers.0.mlp.up_proj": "FP8"}
    dense, one, two = (drafter_pass(SPEC, algorithms, RATES, load).seconds for algorithms in ({}, gate, both))
    saved = SPEC.intermediate_size * SPEC.hidden_size / RATES.read_rate
    assert dense - one == pytest.approx(saved - RATES.gemm_seconds)
    assert dense - two == pytest.approx(2 * saved)
    load = StepLoad(batch=1, num_draft_tokens=SPEC.block_size - 1, context=8192)
    passes = [drafter_pass(SPEC, {}, RATES, load, fp8_context=fp8).bytes for fp8 in (False, True)]
    assert passes[0] - passes[1] == 8192 * SPEC.context_bytes_per_token(fp8=True)


def test_a_recipe_without_plans_is_refused_in_engine_mode() -> None:
    """In native mode a server reads its weights as they are."""
    assert open_system(MOE, "trtllm", None, None, recipe="nvfp4-w4a16", mode="native")
    with pytest.raises(BuildError, match="W4A16_NVFP4: expected weights that TensorRT multiplies as they are"):
        open_system(ENGINE, "trtllm", None, None, recipe="nvfp4-w4a16")


def test_weights_alone_convolutions_and_selectors_are_priced() -> None:
    def seconds(recipe: str, batch: int) -> float:
        return cost_of(Setting(recipe=recipe, head=heads()["target"], batch=batch)).seconds

    assert seconds("int4-w4a16", 1) < seconds("nvfp4", 1), "NVFP4's inputs are quantised by kernels of their own"
    assert seconds("int4-w4a16", 4096) == pytest.approx(seconds("bf16", 4096))
    assert seconds("nvfp4", 4096) < seconds("fp8", 4096) < seconds("bf16", 4096)
    # z-lab/Qwen3.8-27B-DFlash2: ten projections of [1280, 5120] and 20 sides, and of the selector a projection of
    # [256, 5120] and, for each draft, two codebooks' rows of 16 candidates.
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


@pytest.mark.parametrize("recipe", ["bf16", "fp8", "nvfp4"])
def test_weights_are_those_that_deployments_count(recipe: str) -> None:
    """K and V's, which a pass reads twice, once."""
    sizes = draft_sizes(DRAFT)
    algorithm = {"bf16": "", "fp8": "FP8", "nvfp4": "NVFP4"}[recipe]
    algorithms = {module: algorithm for module in SPEC.linear_modules() if module != "fc"}
    assert weight_bytes(recipe) == pytest.approx(sizes.weight_bytes(algorithms, 1))


NAME = st.sampled_from(NAMES)
METHOD = st.sampled_from(METHODS)
BATCH = st.integers(1, 512)
CONTEXT = st.integers(1, 100_000)
PROMPT = st.integers(0, 8192)
EXAMPLES = settings(max_examples=30)


def load(batch: int, num_draft_tokens: int, context: int, prompt: int = 0) -> StepLoad:
    return StepLoad(batch=batch, num_draft_tokens=num_draft_tokens, context=context, prompt_tokens=prompt)


@EXAMPLES
@given(NAME, METHOD, BATCH, st.integers(0, 5), CONTEXT, PROMPT, st.floats(1.01, 4))
def test_bandwidth(name: str, method: Method, batch: int, k: int, context: int, prompt: int, factor: float) -> None:
    model = model_of(name)
    faster = model_of(name, memory_bandwidth=model.rates.memory_bandwidth * factor)
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
def test_steps_keep_the_memory_roof(name: str, method: Method, batch: int, k: int, context: int, prompt: int) -> None:
    model = model_of(name)
    cost = model.price(method, load(batch, k, context, prompt))
    for term in cost.terms:
        assert term.seconds >= term.bytes / model.rates.memory_bandwidth * (1 - 1e-9), term


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


def test_bytes_and_kernels_by_hand() -> None:
    """128 (1 - (124 / 128)^10) = 34.8 experts for 10 tokens."""
    assert touched(power_law(128, 4, 0.0), 10) == pytest.approx(34.8, abs=0.05)
    assert touched(inclusion([1.0] * 4 + [0.0] * 124, 4), 10) == 4
    # gpt-oss-120b, one token: experts 1.90 GB, attention 1.91, lm_head 1.16 and 36,864 B of KV for a token of context
    # in full layers; divided by 8 ranks.
    cost = model_of(MOE).price("none", load(1, 0, 4096))
    full, sliding = 36_864 * 4096, 36_864 * 128
    assert cost.bytes * 8 == pytest.approx(1.90e9 + 1.91e9 + 1.158e9 + full + sliding, rel=0.005)
    # Uniform routing, 10 tokens: 34.8 experts a layer are 16.5 GB
    model = model_of(MOE, routing_exponent=0.0)
    terms = {term.name: term for term in model.price("dflash", load(1, 9, 1)).terms if term.part == "target"}
    assert terms["experts"].bytes * 8 == pytest.approx(16.5e9, rel=0.01)
    # AIConfigurator's table: 17.3 us a layer at 4 experts, B300, TP 8
    terms = {term.name: term for term in model_of(MOE).price("none", load(1, 0, 1)).terms}
    assert terms["experts"].seconds == pytest.approx(36 * 17.3e-6, rel=1e-6)


def test_measured_routing_and_replicated_drafters() -> None:
    system = system_of(MOE)
    narrow = StepModel(system, model_of(MOE).rates, inclusion([1.0] * 8 + [0.0] * 120, 4))
    assert narrow.touched_experts(1000) == pytest.approx(8)
    at = load(16, 9, 1000)
    assert narrow.price("dflash", at).seconds < model_of(MOE).price("dflash", at).seconds
    alone = msgspec.structs.replace(system_of(ENGINE), drafter_ranks=1)
    models = model_of(MOE), StepModel(alone, rates(alone.gpu, alone.runtime))
    shared, whole = (model.price("dflash", load(1, 9, 1000)) for model in models)
    names = [{term.name for term in cost.terms} for cost in (shared, whole)]
    assert ["drafter's all-reduces" in found for found in names] == [True, False]
    layers = [next(t for t in cost.terms if t.name == "layers").bytes for cost in (shared, whole)]
    assert layers[1] / layers[0] == pytest.approx(8 * 4.5 / 16, rel=0.01)  # NVFP4 on every GPU against BF16 / 8


def test_parts_that_a_step_has() -> None:
    assert not [t for t in model_of(DENSE).price("dflash", load(4, 9, 1000)).terms if t.part == "communication"]
    model = model_of(MOE)
    assert model.price("dflash", load(0, 9, 100, 1000)) == model.price("none", load(0, 0, 100, 1000))
    model = model_of(MOE)
    assert model.price("dflash", load(4, 0, 100)) == model.price("none", load(4, 0, 100))
    # Layers of three drafts take as long as those of nine
    model = model_of(ENGINE)
    layers = [
        next(t for t in model.price("dflash", load(64, k, 1000)).terms if t.name == "layers").seconds for k in (3, 9)
    ]
    assert layers[0] == layers[1]


def test_prompts_cost_their_admission_and_attend_to_themselves() -> None:
    at = msgspec.structs.replace(load(4, 9, 100, 1000), prompts=3)
    steps = [model_of(MOE, host_prompt_seconds=each).price("dflash", at).seconds for each in (0.0, 1e-3)]
    assert steps[1] - steps[0] == pytest.approx(3e-3)
    # Two prompts of 4,096 tokens cost less attention than one of 8,192, however they are cut into steps
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
        {t.name: t for t in StepModel(s, rates(B300, "trtllm")).price("none", load(8, 0, 100)).terms}
        for s in (shared, apart)
    )
    assert own["attention projections"].bytes == 2 * together["attention projections"].bytes
    assert own["lm_head"].bytes == 2 * together["lm_head"].bytes
    assert own["attention, KV cache"].bytes == together["attention, KV cache"].bytes  # half of the requests, all heads
    assert own["experts"] == together["experts"]
    assert own["all-reduces"].seconds == pytest.approx(together["all-reduces"].seconds / 2)


def test_popular_experts_cost_tiles_of_their_own() -> None:
    """H200, vLLM's table: 8,192 tokens take 2,905 us balanced, 4,021 under the power law of 1.2."""
    target = msgspec.structs.replace(system_of(MOE), gpu=known_gpu("h200"), tensor_parallel=1, runtime="vllm").target
    kernel = measured_kernel("h200", target, 1, "vllm")
    law, uniform = (power_law(128, 4, exponent) for exponent in (1.2, 0.0))
    assert (skew(law), skew(uniform)) == pytest.approx((1.0, 0.0))
    assert kernel.seconds(128, 8192, 0.0) == pytest.approx(2905.2e-6)
    assert kernel.seconds(128, 8192, 1.0) == pytest.approx(4021e-6, rel=1e-3)
    served = measured_kernel("h200", target, 1, "trtllm")
    assert served.runtime == "trtllm 1.3.0rc20"


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
