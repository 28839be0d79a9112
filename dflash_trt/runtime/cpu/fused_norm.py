# SPDX-License-Identifier: Apache-2.0
"""RMSNorms in one call (cpp/rms_norm), on a CPU in FP32: in transformers each is six operators, mostly calls."""

from __future__ import annotations

import inspect
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_trt import _C
from dflash_trt.runtime.cpu.kernel_call import openmp_team

PROBE_ROWS = 4
TOLERANCE = 1e-5


@torch.inference_mode()
def fuse_norms(model: PreTrainedModel) -> None:
    """Replaces the `forward` of each norm in FP32 that computes what is computed here."""
    if model.dtype != torch.float32:
        return
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module):
            _fuse(module)


def _is_plain(module: nn.Module) -> bool:
    """Whether it has one weight [D] and takes nothing but rows."""
    weights = [weight.data for weight in module.parameters()]
    is_one = len(weights) == 1 and type(weights[0]) is Tensor and weights[0].ndim == 1
    return is_one and len(inspect.signature(type(module).forward).parameters) == 2


def _fuse(module: nn.Module) -> None:
    """Replaces its `forward`, if that is one of the two formulas."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    (weight,) = (parameter.data for parameter in module.parameters())
    rows = torch.randn(PROBE_ROWS, len(weight), generator=torch.Generator().manual_seed(0))
    expected = module(rows)
    for factor in (weight, 1 + weight):
        if isinstance(eps, float) and torch.allclose(normed(factor, eps, rows), expected, TOLERANCE, TOLERANCE):
            module.forward = partial(normed, factor, eps)
            return


def normed(weight: Tensor, eps: float, rows: Tensor) -> Tensor:
    """rows [..., D] / sqrt(mean(rows^2) + eps) * weight [D], all FLOAT."""
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    dim = len(weight)
    _C.rms_norm(rows.data_ptr(), rows.numel() // dim, dim, weight.data_ptr(), eps, out.data_ptr(), *openmp_team())
    return out
