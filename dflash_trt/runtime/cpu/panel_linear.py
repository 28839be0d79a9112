# SPDX-License-Identifier: Apache-2.0
"""Linear layers of targets on a CPU, in C++ (cpp/linear): one kernel for any number of rows.

A row's sum does not depend on the others (`runtime/targets/packed_target.py`).

FP32: weights are laid out once, 16 columns of the product side by side, which MKL does in each call: for the few rows
of a decode step that takes longer than multiplying. BF16: oneDNN (3.12, torch 2.13) takes twice as long for up to 8
rows, as long for 64, and 0.8 of it for a prompt's 512.
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


class PanelLinear(nn.Linear):
    """A linear layer [out, in] in FP32 that holds its weight in panels; `weight` is made again whenever it is read."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)  # without torch's own weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        self._panels = panels(layer.weight.data)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in]"""
        return rows_of(self._panels, self.out_features)

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., in] -> [..., out]"""
        if rows.dtype != torch.float32 or rows.shape[-1] != self.in_features:
            return F.linear(rows, self.weight, self.bias)  # which says what is wrong
        return one_weight(_C.linear_panels, self._panels, self.out_features, self.bias, rows)


def lay_out_linear_layers(model: PreTrainedModel) -> None:
    """Replaces whole linear layers of a model in FP32, one by one, so that one weight at a time is there twice."""
    if model.dtype != torch.float32:
        return
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    for name in names:
        layer: nn.Linear = model.get_submodule(name)
        if type(layer.weight.data) is Tensor and layer.weight.dtype == torch.float32:
            model.set_submodule(name, PanelLinear(layer))


def panels(weight: Tensor) -> Tensor:
    """A weight [..., out, in] as [..., out / 16 rounded up, in, 16], zeros behind the last column."""
    if behind := -weight.shape[-2] % _C.PANEL:
        weight = F.pad(weight, (0, 0, 0, behind))
    *above, num_rows, num_inputs = weight.shape
    return weight.view(*above, num_rows // _C.PANEL, _C.PANEL, num_inputs).transpose(-1, -2).contiguous()


def rows_of(panels: Tensor, num_outputs: int) -> Tensor:
    """A weight [out, in] of panels."""
    return panels.transpose(-1, -2).flatten(0, 1)[:num_outputs].contiguous()
