# SPDX-License-Identifier: Apache-2.0
"""Cost of one pass of a drafter, by layer and number format: the effect of a recipe or a head on a step.

Layers that share a GEMM but no format are several GEMMs; weight-only formats compute in BF16. Kernels between GEMMs and
attention, including those that quantise activations, are counted per backend (shapes.py).

A drafter may be whole on every GPU, or the GPUs share its heads and MLPs: this gives time and memory of both. Shared, a
GPU reads its part of the layers and of the context, and pays two all-reduces per layer. Natively TensorRT-LLM shares
them; for our plans num_ranks decides.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from dflash_trt.checkpoint.draft_spec import MARKOV, PartialDraftSpec
from dflash_trt.checkpoint.draft_tensors import dflash2_shapes, dspark_shapes, lilicorr_shapes, linear_shapes
from dflash_trt.checkpoint.number_formats import ACTIVATION_ALGORITHMS
from dflash_trt.deploy.gpus import known_gpu
from dflash_trt.deploy.resolved_deployment import ServingLoad
from dflash_trt.deploy.sizes import BF16_BITS, WEIGHT_BITS, DraftSizes
from dflash_trt.observe.estimate.constants import Rates, rates
from dflash_trt.observe.estimate.drafter_terms import Head, drafter_terms
from dflash_trt.observe.estimate.shapes import DraftShape, Gemm, SmallKernels, System, backends, small_kernels
from dflash_trt.observe.estimate.step_cost import StepCost, StepLoad


class DrafterOnRanks(msgspec.Struct, frozen=True, kw_only=True):
    ranks: int
    """GPUs that share it; 1: it is whole on each."""
    is_deployed: bool
    """Whether the deployment's drafter is this one."""
    seconds: dict[int, float]
    """Seconds of a pass that proposes all drafts, by batch; without lm_head, which costs both the same."""
    weight_bytes: int
    """On one GPU."""
    context_bytes: int
    """On one GPU, of one request of max_seq_len tokens."""

    @property
    def name(self) -> str:
        place = "whole on each GPU" if self.ranks == 1 else f"shared by {self.ranks} GPUs"
        return f"{place} (as deployed)" if self.is_deployed else place


def drafters_on_ranks(system: System, context: float) -> list[DrafterOnRanks]:
    """Whole and shared, at batch 1 and max_batch_size, each request with `context` tokens.

    Empty where there is nothing to share: no drafter, one rank, or attention by data parallelism. Raises ConfigError
    for a GPU whose rates are not known.
    """
    load = system.memory
    if load is None or load.draft_sizes is None or load.tensor_parallel == 1 or load.enable_attention_dp:
        return []
    kv_bytes = system.draft_kv_bytes
    return [_reckon(load, load.draft_sizes, context, ranks, kv_bytes) for ranks in (1, load.tensor_parallel)]


def _reckon(load: ServingLoad, draft: DraftSizes, context: float, ranks: int, kv_bytes: int) -> DrafterOnRanks:
    gpu_rates = rates(load.gpus.gpu, "trtllm")
    backend = backend_of("trtllm", is_plan=load.mode == "engine")
    shape = dflash_shape(draft.spec, load.algorithms, backend=backend)

    def seconds(batch: int) -> float:
        step = StepLoad(batch=batch, num_draft_tokens=shape.max_draft_tokens, context=context)
        terms = drafter_terms(shape, step, gpu_rates, None, ranks=ranks, kv_bytes=kv_bytes)
        return sum(term.seconds for term in terms)

    row_bytes = draft.spec.context_bytes_per_token(fp8=kv_bytes == 1, num_ranks=ranks)
    return DrafterOnRanks(
        ranks=ranks,
        is_deployed=ranks == load.num_ranks,
        seconds={batch: seconds(batch) for batch in sorted({1, load.max_batch_size})},
        weight_bytes=draft.weight_bytes(load.algorithms, ranks),
        context_bytes=load.max_seq_len * row_bytes,
    )


FUSED = re.compile(r"(layers\.\d+)\.(?:self_attn\.[qkv]|mlp\.(?:gate|up))_proj")
CONTEXT = re.compile(r"layers\.\d+\.self_attn\.[kv]_proj")


PLAN = "plan"


def backend_of(runtime: str, *, is_plan: bool) -> str:
    """Backend of a drafter in a runtime: our plans, or the runtime's own layers."""
    return PLAN if is_plan else runtime


def dflash_shape(
    spec: PartialDraftSpec, algorithms: Mapping[str, str], *, name: str = "", backend: str | None = None
) -> DraftShape:
    """A draft's facts for the cost of a step, with `algorithms` by quantised module.

    Without a `backend` there are no small kernels.
    """
    gemms: Counter[tuple[str, str, str]] = Counter()  # parameters, by term, what they share a GEMM in, and algorithm
    for module, shape in linear_shapes(spec).items():
        algorithm, params = algorithms.get(module, ""), math.prod(shape)
        # Equal for q, k and v of a layer, and for gate and up.
        fused = module.rpartition(".")[0] if FUSED.fullmatch(module) else module
        gemms["tap projection" if module == "fc" else "layers", fused, algorithm] += params
        if CONTEXT.fullmatch(module):
            gemms["context K and V", "", algorithm] += params
    for tensor, shape in dflash2_shapes(spec).items():
        if tensor.endswith("_projection.weight"):
            gemms["selector" if "hidden" in tensor else "block convolutions", tensor, ""] += math.prod(shape)
    for tensor, shape in lilicorr_shapes(spec).items():
        if len(shape) == 2:
            gemms["selector", tensor, ""] += math.prod(shape)
    if spec.markov_head is not None:  # over the whole vocabulary, for each slot after the first
        w2 = math.prod(dspark_shapes(spec)[f"{MARKOV}.markov_w2.weight"])
        gemms |= {("selector", f"slot {slot}", ""): w2 for slot in range(spec.num_draft_tokens)}
    selector = spec.candidate_selector
    runs = None if backend is None else backends()[backend]
    quantized = [(modules, algorithm) for term, modules, algorithm in gemms if term == "layers"]
    return DraftShape(
        name=name, num_layers=spec.num_layers, hidden_size=spec.hidden_size,
        num_key_value_heads=spec.num_key_value_heads, head_dim=spec.head_dim,
        num_taps=len(spec.target_layer_ids), max_draft_tokens=spec.num_draft_tokens, gemms=_by_term(gemms),
        num_convolutions=sum(term == "block convolutions" for term, _, _ in gemms),
        gathered_values=0 if selector is None else 2 * selector.top_k * selector.rank,
        runs_whole_block=runs is not None and runs.has_our_kernel, first_proposing_row=spec.first_proposing_row,
        has_our_kernel=runs is not None and runs.has_our_kernel,
        small_kernels=SmallKernels() if runs is None else small_kernels(runs, spec, quantized),
    )  # fmt: skip


def _by_term(gemms: Counter[tuple[str, str, str]]) -> dict[str, tuple[Gemm, ...]]:
    """GEMMs of one term and format together, which costs the same."""
    kernels = Counter((term, algorithm) for term, _, algorithm in gemms)
    params: Counter[tuple[str, str]] = Counter()
    for (term, _, algorithm), number in gemms.items():
        params[term, algorithm] += number
    terms: dict[str, tuple[Gemm, ...]] = {}
    for (term, algorithm), number in params.items():
        bits = WEIGHT_BITS.get(algorithm, BF16_BITS)
        compute_bits = bits if algorithm in ACTIVATION_ALGORITHMS else BF16_BITS
        gemm = Gemm(number, bits, kernels[term, algorithm], compute_bits)
        terms[term] = (*terms.get(term, ()), gemm)
    return terms


def drafter_pass(
    spec: PartialDraftSpec, algorithms: Mapping[str, str], rates: Rates, load: StepLoad, head: Head | None = None,
    *, fp8_context: bool = False, backend: str = PLAN,
) -> StepCost:  # fmt: skip
    """The account of one pass on one GPU, `algorithms` by quantised module; without a `head` its term is left out."""
    shape = dflash_shape(spec, algorithms, backend=backend)
    terms = drafter_terms(shape, load, rates, head, kv_bytes=1 if fp8_context else 2)
    return StepCost(tuple(term for term in terms if term.seconds))


def drafter_seconds(
    spec: PartialDraftSpec, gpu: str, batch_size: int, context_tokens: int
) -> Callable[[Mapping[str, str], bool], float]:
    """Prices a pass on `gpu` over all requests' `context_tokens`, by module algorithms and context format.

    Raises ConfigError for an unknown GPU.
    """
    constants = rates(known_gpu(gpu, "--gpu"), "trtllm")
    load = StepLoad(batch=batch_size, num_draft_tokens=spec.num_draft_tokens, context=context_tokens / batch_size)

    def seconds(algorithms: Mapping[str, str], fp8_context: bool) -> float:
        cost = drafter_pass(spec, algorithms, constants, load, fp8_context=fp8_context)
        return round(cost.seconds, 15)  # layers of equal cost are equal

    return seconds
