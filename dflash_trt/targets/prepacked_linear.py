# SPDX-License-Identifier: Apache-2.0
"""Linear layers in oneDNN's own layout of weights, on a CPU in FP32.

Torch gives such products to MKL. On an AMD EPYC that takes for many rows twice what oneDNN takes with weights that were
laid out for it once, and at Qwen3-0.6B's sizes for 4 to 64 rows two to four times; on other processors it was not
measured. It is what TorchInductor does with frozen weights (torch 2.13, torch/_inductor/fx_passes/mkldnn_fusion.py),
whose operators these are. A call takes 8 to 15 us more than one of torch's own, so small weights are held in both
layouts, and each product goes where it is faster.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

MIN_BYTES = 2**20
"""Of a weight that is held in this layout alone: below, both layouts of a whole layer are a few MiB."""
MAX_MULTIPLICATIONS = 2**21
"""Of a product with a smaller weight that torch computes. On an AMD EPYC, one thread, both ways take 20 to 40 us for
half as many when nothing else runs, whether 128 -> 128 for 64 rows or 512 -> 512 for 4; between the other work of a
pass calls are dearer, and passes with a limit of 2**20 were none faster. At twice as many MKL takes 1.5 to 2 times what
oneDNN takes."""
ROWS = 8
"""For which the layout is chosen: a block of one request."""


def can_prepack(model: PreTrainedModel) -> bool:
    """Not on other devices, in other types, and where this torch was built without oneDNN."""
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return model.dtype == torch.float32 and model.device.type == "cpu" and has_onednn


def prepack(model: PreTrainedModel) -> None:
    """Lays out the weights of linear layers, one after the other; a head that is the embeddings, too, stays as well.

    Does nothing where `can_prepack` says no, and for shards.
    """
    if not can_prepack(model):
        return
    embeddings = model.get_input_embeddings().weight
    for module in model.modules():
        weight = module.weight if type(module) is nn.Linear else None
        if weight is not None and type(weight.data) is Tensor:
            packed = reordered(weight.data)
            if weight.nbytes < MIN_BYTES:
                module.forward = partial(_faster_product, weight.data, packed, module.bias)
                continue
            module.forward = partial(_product, packed, module.bias, len(weight))
            if weight is not embeddings:
                module.weight = nn.Parameter(weight.data.new_empty(0), requires_grad=False)


def weight_of(module: nn.Linear) -> Tensor:
    """Its weight [out, in], laid out or not."""
    weight = getattr(module.forward, "args", (module.weight.detach(),))[0]
    return weight.to_dense() if weight.is_mkldnn else weight


def _faster_product(weight: Tensor, packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """rows [..., in] -> [..., out] by the one of two layouts of a weight [out, in] that suits so many rows."""
    if rows.numel() * len(weight) <= MAX_MULTIPLICATIONS:
        return F.linear(rows, weight, bias)
    return product(packed, bias, rows)


def _product(packed: Tensor, bias: Tensor | None, num_outputs: int, rows: Tensor) -> Tensor:
    """rows [..., in] -> [..., out]."""
    if rows.numel() == 0:
        return rows.new_empty(*rows.shape[:-1], num_outputs)
    return product(packed, bias, rows)


def reordered(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
    return packed


def product(packed: Tensor, bias: Tensor | None, rows: Tensor) -> Tensor:
    """rows [..., in], at least one -> [..., out]."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return found
