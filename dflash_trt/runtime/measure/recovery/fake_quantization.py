# SPDX-License-Identifier: Apache-2.0
"""Quantised and dequantised values in PyTorch, FLOAT: bit-equal to the packers and to the lowered graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.number_formats import BLOCK, FP8, INT4_BLOCK
from dflash_trt.quantize.bounds import Ranges
from dflash_trt.quantize.recipe import Recipe
from dflash_trt.quantize.scales import cache_scales, group_scales, input_scales, scaled_by_tensor

E2M1_MAX, E4M3_MAX = 6.0, 448.0
SMALLEST_BLOCK_SCALE = 2.0**-9  # the least that E4M3 holds
INT4_STEPS = (7.0, 7.25, 7.5, 7.75, 8.0)
EXPONENT_BITS = 0x7F800000  # mantissa bits of a FLOAT


def quantised_weight(weight: torch.Tensor, algorithm: str, scale: float | None) -> torch.Tensor:
    """weight [R, K], packed by `algorithm` with its weight_scale or weight_scale_2 and read back: [R, K] FLOAT.

    `scale` is None for INT4, which has scales of blocks alone.
    """
    if scale is None:
        return _int4(weight)
    if algorithm == FP8:
        return _e4m3(weight.float() / _scalar(scale, weight)) * scale
    blocks = weight.float().view(len(weight), -1, BLOCK)
    scale_2 = _scalar(scale, weight)
    ratios = blocks.abs().amax(-1, keepdim=True) / (E2M1_MAX * scale_2)
    block_scales = _e4m3(torch.where(ratios == 0, 1.0, ratios).clamp(SMALLEST_BLOCK_SCALE, E4M3_MAX))
    units = block_scales * scale_2
    return (_e2m1(blocks / units) * units).flatten(-2)


def _int4(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.float().view(len(weight), -1, INT4_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    nearest, least = torch.zeros_like(blocks), torch.full_like(largest, torch.inf, dtype=torch.float64)
    for steps in INT4_STEPS:
        scale = (largest / steps).bfloat16().float()
        rounded = (blocks / torch.where(scale == 0, 1.0, scale)).clamp(-8, 7).round() * scale
        # One after the other, as the packer adds them: torch's own sum takes another order.
        error = (blocks - rounded).double().square().cumsum(-1)[..., -1:]
        is_better = error < least
        nearest, least = torch.where(is_better, rounded, nearest), torch.where(is_better, error, least)
    return nearest.flatten(-2)


def quantised_input(x: torch.Tensor, algorithm: str, scale: float) -> torch.Tensor:
    """x [.., K] FLOAT as a layer of that algorithm and static input_scale reads it; gradients pass as through x."""
    return _StraightThrough.apply(x, _fp8(x, scale) if algorithm == FP8 else _nvfp4(x, scale))  # type: ignore[no-untyped-call, no-any-return]


def quantised_rows(x: torch.Tensor, scale: float) -> torch.Tensor:
    """K or V as an FP8 context cache of that scale returns them; gradients pass as through x."""
    return _StraightThrough.apply(x, _fp8(x, scale))  # type: ignore[no-untyped-call, no-any-return]


class _StraightThrough(torch.autograd.Function):
    """The second operand, with the gradient of the first (arXiv 1308.3432, section 4)."""

    @staticmethod
    def forward(_context: object, x: torch.Tensor, quantised: torch.Tensor) -> torch.Tensor:
        return quantised

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _fp8(x: torch.Tensor, scale: float) -> torch.Tensor:
    return _e4m3(x.detach() / _scalar(scale, x)) * scale


def _nvfp4(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Dynamic block scales; a block whose scale underflows is 0."""
    blocks = x.detach().reshape(*x.shape[:-1], -1, BLOCK)
    global_scale = _scalar(scale, x)
    units = _e4m3(blocks.abs().amax(-1, keepdim=True) / (E2M1_MAX * global_scale)) * global_scale
    return _e2m1(blocks / torch.where(units == 0, 1.0, units)).mul_(units).flatten(-2)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    """To nearest even, saturating: torch's own cast makes NaN of what is larger."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """To nearest even code point, saturating; in place. Code points are 0.5 apart below 2, then 1, then 2."""
    size = x.abs().clamp_(max=E2M1_MAX)
    step = size.view(torch.int32).bitwise_and(EXPONENT_BITS).view(torch.float32).mul_(0.5).clamp_(min=0.5)
    return size.div_(step).round_().mul_(step).copysign_(x)


def _scalar(scale: float, x: torch.Tensor) -> torch.Tensor:
    """`scale` beside x: by a Python number, CUDA would multiply with the reciprocal instead of dividing."""
    return torch.tensor(scale, dtype=torch.float32, device=x.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Rounding that is fixed before training: algorithms, and the static scales of activations and cache."""

    algorithms: Mapping[str, str]
    """Algorithm by quantised module."""
    inputs: Mapping[str, float]
    """input_scale by module whose input is quantised; the same for all that one GEMM multiplies."""
    cache: Mapping[str, float]
    """k_scale and v_scale by tensor name; empty for a cache that is not quantised."""


def recipe_numerics(spec: DraftSpec, recipe: Recipe, ranges: Ranges | None) -> Numerics:
    """The numerics of `recipe`; raises CheckpointError where it needs ranges that `ranges` lacks."""
    algorithms = recipe.algorithms(spec.linear_modules())
    if ranges is None:
        return Numerics(algorithms=algorithms, inputs={}, cache={})
    inputs = input_scales(spec, algorithms, ranges.inputs)
    cache = cache_scales(spec, ranges) if recipe.fp8_kv_cache else {}
    return Numerics(
        algorithms=algorithms,
        inputs={module: float(scale) for module, scale in inputs.items()},
        cache={name: float(scale) for name, scale in cache.items()},
    )


def quantised_weights(
    spec: DraftSpec, numerics: Numerics, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`weights` [out, in] by module, of the checkpoint's dtype, packed and read back as FLOAT; dense ones widened."""
    by_tensor = scaled_by_tensor(numerics.algorithms)
    scales = group_scales(spec, by_tensor, lambda module: weights[module].abs().max().item())
    by_module = {module: float(scale) for module, scale in scales.items()}
    return {
        module: quantised_weight(weight, numerics.algorithms[module], by_module.get(module))
        if module in numerics.algorithms
        else weight.float()
        for module, weight in weights.items()
    }
