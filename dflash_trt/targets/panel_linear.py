# SPDX-License-Identifier: Apache-2.0
"""Linear layers of targets in FP32 on a CPU, in C++ (cpp/linear/panels.h): one kernel for any number of rows.

So a row's sums do not depend on the others. Weights are laid out once, 16 columns of the product side by side, in the
place of the model's own. Torch gives such products to MKL, which lays weights out in each call: for the few rows of a
decode step that takes longer than multiplying.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_trt import _C
from dflash_trt.targets.linear_call import one_weight


def suits(model: PreTrainedModel) -> bool:
    """Not on other devices, and in other types."""
    return bool(model.dtype == torch.float32 and model.device.type == "cpu")


def lay_out_linear_layers(model: PreTrainedModel) -> None:
    """Lays out the weights of linear layers, one after the other; a head that is the embeddings, too, stays as well.

    Does nothing where the model does not suit, and for shards.
    """
    if not suits(model):
        return
    embeddings = model.get_input_embeddings().weight
    for module in model.modules():
        weight = module.weight if type(module) is nn.Linear else None
        if weight is not None and type(weight.data) is Tensor and weight.dtype == torch.float32 and weight.numel():
            bias = None if module.bias is None else module.bias.data
            module.forward = partial(linear, panels(weight.data), len(weight), bias)
            if weight is not embeddings:
                module.weight = nn.Parameter(weight.data.new_empty(0), requires_grad=False)


def weight_of(module: nn.Linear) -> Tensor:
    """Its weight [out, in], laid out or not."""
    if module.weight.numel():
        return module.weight.detach()
    laid_out, num_outputs, *_ = cast("partial[Tensor]", module.forward).args
    return rows_of(laid_out, num_outputs)


def panels(weight: Tensor) -> Tensor:
    """A weight [..., out, in] as [..., out / 16 rounded up, in, 16], zeros behind the last column."""
    if behind := -weight.shape[-2] % _C.PANEL:
        weight = F.pad(weight, (0, 0, 0, behind))
    *above, num_rows, num_inputs = weight.shape
    return weight.view(*above, num_rows // _C.PANEL, _C.PANEL, num_inputs).transpose(-1, -2).contiguous()


def rows_of(panels: Tensor, num_outputs: int) -> Tensor:
    """A weight [out, in] of panels."""
    return panels.transpose(-1, -2).flatten(0, 1)[:num_outputs].contiguous()


def linear(panels: Tensor, num_outputs: int, bias: Tensor | None, rows: Tensor) -> Tensor:
    """rows [..., in] times the transpose of a weight [out, in] in panels, and bias [out], all FP32 -> [..., out]."""
    num_inputs = panels.shape[-2]
    if rows.dtype != torch.float32 or rows.shape[-1] != num_inputs:
        return F.linear(rows, rows_of(panels, num_outputs), bias)  # which says what is wrong
    return one_weight(_C.linear_panels, panels, num_outputs, bias, rows)
