# SPDX-License-Identifier: Apache-2.0
"""How a recipe's layers round weights, inputs and cache rows: fixed before training, and what is packed after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.quantize.bounds import Ranges
from dflash_trt.quantize.recipe import Recipe
from dflash_trt.quantize.scales import cache_scales, group_scales, input_scales
from dflash_trt.runtime.measure.recovery.fake_quantization import quantised_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """What is not trained: algorithms and the static scales of activations and cache."""

    algorithms: Mapping[str, str]
    """By quantised module."""
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
    scales = group_scales(spec, numerics.algorithms, lambda module: weights[module].abs().max().item())
    return {
        module: quantised_weight(weight, numerics.algorithms[module], float(scales[module]))
        if module in numerics.algorithms
        else weight.float()
        for module, weight in weights.items()
    }
