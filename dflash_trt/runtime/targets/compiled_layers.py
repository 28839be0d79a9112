# SPDX-License-Identifier: Apache-2.0
"""Layers of a target in a few kernels: torch.compile of the model's own code, layer by layer.

Layers of one kind share what is compiled, as in PyTorch's regional compilation
(https://docs.pytorch.org/tutorials/recipes/regional_compilation.html). Attention runs between the parts of a layer, as
it is written: it reads the pass and the caches. A layer of Qwen3 launches 15 kernels; transformers launches 60.

Linear layers of one input are one product, as vLLM and TensorRT-LLM merge them: q, k and v, and gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from dflash_trt.device.fused import Fused
from dflash_trt.runtime.targets.packed_pass import IMPLEMENTATION, slot_attention

ONCE = ("rotary_emb", "norm")
"""Other modules of a decoder, by the beginning of their names."""


def compile_layers(model: PreTrainedModel) -> None:
    """Compiles the decoder's layers that have attention, once they run on a GPU; not those shared by ranks."""
    if any(type(weight.data) is not Tensor for weight in model.parameters()):
        return
    AttentionInterface.register(IMPLEMENTATION, torch.compiler.disable(slot_attention))  # type: ignore[no-untyped-call]
    decoder = model.get_decoder()
    merge_linear_layers(decoder)
    layers = (layer for layer in decoder.layers if hasattr(layer, "self_attn"))
    others = (module for name, module in decoder.named_children() if name.startswith(ONCE))
    for module in (*layers, *others):
        module.forward = Fused(module.forward)


MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers in a module, in the order in which transformers calls them."""


class MergedLinear(nn.Module):
    """The first of several layers: it computes the others' rows, too, which those then take."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        """Copies weights and biases into one each; those of `layers` become parts of it."""
        super().__init__()
        self.sizes = [layer.out_features for layer in layers]
        self.weight = _merged([layer.weight for layer in layers])
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self.bias = _merged(biases) if biases else None
        self.rows: Tensor | None = None
        """Input of the products that are not taken yet."""
        self.products: tuple[Tensor, ...] = ()

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., K] -> the first layer's [..., N]."""
        self.rows, self.products = rows, torch.split(F.linear(rows, self.weight, self.bias), self.sizes, -1)
        return self.products[0]


def _merged(parameters: Sequence[Tensor]) -> nn.Parameter:
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, torch.split(whole, [len(each) for each in parameters]), strict=True):
        parameter.data = part
    return nn.Parameter(whole, requires_grad=False)


class MergedPart(nn.Module):
    """Another of the layers: it takes its rows where the input is that of the first, and computes any others."""

    def __init__(self, merged: MergedLinear, index: int, layer: nn.Linear) -> None:
        super().__init__()
        self.merged, self.index, self.layer = merged, index, layer

    def forward(self, rows: Tensor) -> Tensor:
        """rows [..., K] -> [..., N]."""
        if rows is not self.merged.rows:
            return self.layer(rows)  # type: ignore[no-any-return]
        product = self.merged.products[self.index]
        if self.index == len(self.merged.sizes) - 1:
            self.merged.rows, self.merged.products = None, ()
        return product


@torch.no_grad()
def merge_linear_layers(decoder: nn.Module) -> None:
    """Replaces the layers MERGED of each module that has them whole, of one type, and all with a bias or none."""
    for module in list(decoder.modules()):
        for names in MERGED:
            layers = [getattr(module, name, None) for name in names]
            found = [layer for layer in layers if type(layer) is nn.Linear and type(layer.weight.data) is Tensor]
            if len(found) < len(names) or len({(x.weight.dtype, x.in_features, x.bias is None) for x in found}) > 1:
                continue
            merged = MergedLinear(found)
            parts = (MergedPart(merged, index, layer) for index, layer in enumerate(found[1:], start=1))
            for name, replacement in zip(names, (merged, *parts), strict=True):
                setattr(module, name, replacement)
