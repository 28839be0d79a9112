# SPDX-License-Identifier: Apache-2.0
"""An estimate in sentences."""

from __future__ import annotations

from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.report import Estimate
from dflash_trt.observe.estimate.shapes import Method, System
from dflash_trt.observe.estimate.validation import summary
from dflash_trt.observe.plots.method_styles import TITLES

FP8_BITS = 8


def title(result: Estimate) -> str:
    system = result.system
    return f"{system.target.target} on {system.gpu.name}x{system.num_gpus}: predicted, not measured"


def verdict(result: Estimate, replicas: int = 1) -> str:
    """Speed of one user, gain of drafts, most throughput."""
    dflash = {row.point.batch: row for row in result.curve("dflash").points}
    if not dflash:
        return "DFlash: no request fits"
    one = result.curve("dflash").points[0].user_rate
    limit = max(result.system.max_batch_size, min(dflash))
    most = max(row.gpu_rate.value for batch, row in dflash.items() if batch <= limit)
    gain = " and ".join(f"{factor:.1f}x at batch {at}" for at, factor in _ends(result, "dflash", limit).items())
    gain = gain.replace("x at", "x plain decoding at", 1)
    for method in [each for each in ("mtp", "ngram") if gain and each in result.system.methods]:
        factors = " and ".join(f"{factor:.1f}x" for factor in _ends(result, method, limit).values())
        gain += f" ({TITLES[method]}: {factors})" if factors else ""
    servers = ""
    if replicas > 1:
        num_gpus = replicas * result.system.num_gpus
        servers = f" {replicas} servers on {num_gpus} GPUs: {most * num_gpus:,.0f} tokens/s at most, evenly divided."
    return (
        f"DFlash: one user gets {one.value:,.0f} tokens/s ({one.low:,.0f} to {one.high:,.0f} over constants'"
        f" ranges); {gain or 'plain decoding does not fit'}; a GPU at most {most:,.0f} tokens/s at batches up to"
        f" {limit}.{servers}"
    )


def _ends(result: Estimate, method: Method, limit: int) -> dict[int, float]:
    """Speed of a user over plain decoding, at the smallest and the largest batch that both hold up to `limit`."""
    plain, other = ({row.point.batch: row for row in result.curve(each).points} for each in ("none", method))
    shared = sorted(batch for batch in plain.keys() & other.keys() if batch <= limit)
    return {at: other[at].user_rate.value / plain[at].user_rate.value for at in (*shared[:1], *shared[-1:])}


def caution(system: System) -> str:
    """Warnings where predictions are known to be too high; "" elsewhere."""
    said = []
    has_fp4 = rates(system.gpu, system.runtime).fp4_flops > 0
    if not has_fp4 and system.target.expert_bits < FP8_BITS:
        said.append(
            "for four-bit experts on GPUs without FP4 (Hopper), TensorRT-LLM publishes 1.1 to 1.5 times less"
            " throughput at saturation than predicted, and 1.7 to 2.4 times less with attention data parallelism. The"
            " ranges hold what it publishes."
        )
    if system.runtime == "vllm" and system.target.num_linear_layers:
        said.append(
            "of a target with delta nets vLLM prepares each layer's cache anew in every step once it drafts: on an"
            " H100 Qwen3.5-4B got 1.2x plain decoding where 3.7x is predicted (vLLM #49730)."
        )
    return "\n".join(f"Caution: {each}" for each in said)


def lead(result: Estimate) -> str:
    """The question, and what kind of figures answer it."""
    system, traffic = result.system, result.traffic
    return (
        f"TP {system.tensor_parallel}, EP {system.expert_parallel}, {system.runtime}; {traffic.prompt_tokens} prompt"
        f" and {traffic.output_tokens} output tokens; DFlash: {result.acceptance_source}; EAGLE-3: an assumed shape"
        f"{''.join(f'; {source}' for source in result.other_sources)}."
        " Predicted from sizes and published kernel times; bands follow from the ranges of the constants."
        f" {summary(system)} (docs/estimate.md)."
    )
