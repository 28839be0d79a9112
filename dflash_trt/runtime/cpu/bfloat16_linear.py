# SPDX-License-Identifier: Apache-2.0
"""Linear layers of targets in BF16 on a CPU, in C++ (cpp/linear): one kernel for any number of rows.

So a row's sum does not depend on the others (`targets/packed_target.py`). oneDNN (3.12, torch 2.13) takes twice as
long for up to 8 rows, as long for 64, and 0.8 of it for a prompt's 512.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_trt import _C
from dflash_trt.runtime.cpu.kernel_call import one_weight

MIN_INPUTS = 512
"""Smallest input size of a layer to replace; many layers with shorter rows are faster with oneDNN."""


def replace_linear_layers(model: PreTrainedModel) -> bool:
    """Replaces the `forward` of whole linear layers in BF16, and says whether that were all of them."""
    if model.dtype != torch.bfloat16:
        return False
    layers: list[Any] = [module for module in model.modules() if type(module) is nn.Linear]
    ours = [layer for layer in layers if type(layer.weight.data) is Tensor and _suits(layer.weight.data)]
    for layer in ours:
        layer.forward = partial(linear, layer.weight.data, None if layer.bias is None else layer.bias.data)
    return len(ours) == len(layers)


def _suits(weight: Tensor) -> bool:
    """A weight [out, in]."""
    return weight.dtype == torch.bfloat16 and weight.is_contiguous() and weight.shape[1] >= MIN_INPUTS


def linear(weight: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """rows [..., in] times the transpose of weight [out, in], and bias [out], all BF16 -> [..., out]."""
    if rows.dtype != torch.bfloat16 or rows.shape[-1] != weight.shape[-1]:
        return F.linear(rows, weight, bias)  # which says what is wrong
    return one_weight(_C.linear_bfloat16, weight, len(weight), bias, rows)
