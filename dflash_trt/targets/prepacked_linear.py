# SPDX-License-Identifier: Apache-2.0
"""Large linear layers in oneDNN's own layout of weights, on a CPU in FP32.

Torch gives such products to MKL. On an AMD EPYC, at Qwen3-0.6B's sizes, that takes for 4 to 64 rows two to four times
what oneDNN takes with weights that were laid out for it once; on other processors it was not measured. It is what
TorchInductor does with frozen weights (torch 2.13, torch/_inductor/fx_passes/mkldnn_fusion.py), whose operators these
are.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

MIN_BYTES = 2**20
"""Of a weight: below, a call costs more than the product."""
ROWS = 8
"""For which the layout is chosen: a block of one request."""


def prepack(model: PreTrainedModel) -> None:
    """Lays out the weights of linear layers, one after the other; a head that is the embeddings, too, stays as well.

    Does nothing on other devices, in other types, for shards, and where this torch was built without oneDNN.
    """
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if model.dtype != torch.float32 or model.device.type != "cpu" or not has_onednn:
        return
    embeddings = model.get_input_embeddings().weight
    for module in model.modules():
        weight = module.weight if type(module) is nn.Linear else None
        if weight is not None and type(weight.data) is Tensor and weight.nbytes >= MIN_BYTES:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.data, ROWS)
            module.forward = partial(_product, packed, module.bias, len(weight))
            if weight is not embeddings:
                module.weight = nn.Parameter(weight.data.new_empty(0), requires_grad=False)


def weight_of(module: nn.Linear) -> Tensor:
    """Its weight [out, in], laid out or not."""
    packed = getattr(module.forward, "args", (module.weight.detach(),))[0]
    return packed.to_dense() if packed.is_mkldnn else packed


def _product(packed: Tensor, bias: Tensor | None, num_outputs: int, rows: Tensor) -> Tensor:
    """rows [..., in] -> [..., out]."""
    if rows.numel() == 0:
        return rows.new_empty(*rows.shape[:-1], num_outputs)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return product
