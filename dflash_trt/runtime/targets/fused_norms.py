# SPDX-License-Identifier: Apache-2.0
"""RMSNorms of a target, one kernel each in the place of transformers' eight: of 60 in a layer of Qwen3, 28 go."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

PROBE_ROWS = 4
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest difference, as a part of a value; in BF16 transformers rounds once more on the way."""
Normed = Callable[[Tensor, float, Tensor], Tensor]
"""rows [..., D] / sqrt(mean(rows^2) + eps) * factor [D], of factor, eps and rows."""


@torch.inference_mode()
def replace_norms(model: PreTrainedModel, normed: Normed) -> None:
    """Replaces the `forward` of each norm, in the model's type, that computes what `normed` does."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module, model.dtype):
            _replace(module, normed)


def _is_plain(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether it has one weight [D] of this type, and takes nothing but rows."""
    weights = [weight.data for weight in module.parameters()]
    is_one = len(weights) == 1 and type(weights[0]) is Tensor and weights[0].ndim == 1 and weights[0].dtype == dtype
    return dtype in TOLERANCES and is_one and len(inspect.signature(type(module).forward).parameters) == 2


def _replace(module: nn.Module, normed: Normed) -> None:
    """Replaces its `forward`, if that is one of two formulas; BF16 would round the second one's factor."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    (weight,) = (parameter.data for parameter in module.parameters())
    rows = torch.randn(PROBE_ROWS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected, tolerance = module(rows), TOLERANCES[weight.dtype]
    for factor in (weight, 1 + weight) if weight.dtype == torch.float32 else (weight,):
        if isinstance(eps, float) and torch.allclose(normed(factor, eps, rows), expected, tolerance, tolerance):
            module.forward = partial(normed, factor, eps)
            return


def torch_norm(factor: Tensor, eps: float, rows: Tensor) -> Tensor:
    """`Normed` by torch, which has a kernel for it on a GPU where both types are one (2.11)."""
    return F.rms_norm(rows, factor.shape, factor, eps)
