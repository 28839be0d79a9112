# SPDX-License-Identifier: Apache-2.0
"""What one pass of a drafter costs, layer by layer and format by format: what a recipe or a head changes of a step.

The terms of `step`, for a drafter that stands whole on one GPU (engine mode). A GEMM is a fixed time and the larger of
its weights' bytes / rate and its flops / the format's rate; weights-only formats compute in BF16. Layers that share a
GEMM but no format are several GEMMs. Quantising activations costs nothing here: fused, as TensorRT does it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.quantization import W4A16_NVFP4
from dflash_trt.deploy.sizes import BF16_BITS, WEIGHT_BITS
from dflash_trt.observe.estimate.constants import Rates, rates
from dflash_trt.observe.estimate.step import StepCost, Term

FUSED = re.compile(r"(layers\.\d+)\.(?:self_attn\.[qkv]|mlp\.(?:gate|up))_proj")
CONTEXT = re.compile(r"layers\.\d+\.self_attn\.[kv]_proj")


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What turns the drafter's hidden states into proposals."""

    rows: int
    """Tokens that it can propose."""
    algorithm: str = ""
    """Of its weights; BF16 unless given."""
    ranks: int = 1
    """GPUs that share it: a target's lm_head is divided among its ranks, a drafter's own stands on each."""

    def num_bytes(self, hidden_size: int) -> float:
        """Of one rank's part."""
        return self.rows * hidden_size * WEIGHT_BITS.get(self.algorithm, BF16_BITS) / 8 / self.ranks


class DrafterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a pass is given: a whole block of each request, all of whose tokens become context of the next."""

    batch: int
    context_tokens: int
    """In the context cache, of all requests together."""
    fp8_context: bool = False


def drafter_pass(
    spec: PartialDraftSpec, algorithms: Mapping[str, str], rates: Rates, load: DrafterLoad, head: Head | None = None
) -> StepCost:
    """The account of one pass, `algorithms` by quantised module; without a `head` its term is left out."""
    rows = load.batch * spec.block_size
    shapes = {module: shape[0] * shape[1] for module, shape in spec.linear_shapes().items()}
    terms = []
    for name, gemms in _gemms(spec).items():
        parts = [part for modules in gemms for part in _by_algorithm(modules, shapes, algorithms).items()]
        seconds, num_bytes = zip(*(_gemm(rates, algorithm, params, rows) for algorithm, params in parts), strict=True)
        terms.append(Term(name, "drafter", sum(seconds), sum(num_bytes)))
    context = load.context_tokens * spec.context_bytes_per_token(fp8=load.fp8_context)
    layers = spec.num_layers
    attention = layers * rates.attention_seconds + context / rates.read_rate
    terms.append(Term("attention, context", "drafter", attention, context))
    small = layers * rates.small_kernels_per_layer * rates.small_kernel_seconds
    terms.append(Term("norms, RoPE and cache writes", "drafter", small))
    if head is not None:
        params = head.rows * spec.hidden_size / head.ranks
        seconds_of_head, bytes_of_head = _gemm(rates, head.algorithm, params, load.batch * (spec.block_size - 1))
        terms.append(Term("head", "drafter", seconds_of_head, bytes_of_head))
    return StepCost(tuple(terms))


def drafter_seconds(
    spec: PartialDraftSpec, gpu: str, batch_size: int, context_tokens: int
) -> Callable[[Mapping[str, str], bool], float]:
    """Seconds of a pass on `gpu`, by the algorithms of quantised modules and whether the context is FP8.

    Raises ConfigError for a GPU whose rates are not known.
    """
    constants = rates(gpu, "trtllm")

    def seconds(algorithms: Mapping[str, str], fp8_context: bool) -> float:
        load = DrafterLoad(batch=batch_size, context_tokens=context_tokens, fp8_context=fp8_context)
        return round(drafter_pass(spec, algorithms, constants, load).seconds, 15)  # what costs alike is equal

    return seconds


def _gemms(spec: PartialDraftSpec) -> dict[str, list[list[str]]]:
    """By term: the modules of each GEMM."""
    modules = list(spec.linear_shapes())
    layers: dict[str, list[str]] = {}
    for module in modules:
        if module != "fc":
            layers.setdefault(_gemm_name(module), []).append(module)
    context = [module for module in modules if CONTEXT.fullmatch(module)]
    return {"tap projection": [["fc"]], "context K and V": [context], "layers": list(layers.values())}


def _gemm_name(module: str) -> str:
    """The same for q, k and v of a layer, and for gate and up."""
    match = FUSED.fullmatch(module)
    return module if match is None else module.rpartition(".")[0]


def _by_algorithm(modules: list[str], params: Mapping[str, int], algorithms: Mapping[str, str]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for module in modules:
        counted[algorithms.get(module, "")] += params[module]
    return counted


def _gemm(rates: Rates, algorithm: str, params: float, rows: int) -> tuple[float, float]:
    """Seconds and bytes of one GEMM over `params` weights."""
    bits = WEIGHT_BITS.get(algorithm, BF16_BITS)
    num_bytes = params * bits / 8
    rate = rates.compute_rate(BF16_BITS if algorithm == W4A16_NVFP4 else bits)
    return rates.gemm_seconds + max(num_bytes / rates.read_rate, 2 * params * rows / rate), num_bytes
