# SPDX-License-Identifier: Apache-2.0
"""Layers of a target in a few kernels: torch.compile of the model's own code, layer by layer.

Layers of one kind share what is compiled, as in PyTorch's regional compilation
(https://docs.pytorch.org/tutorials/recipes/regional_compilation.html). Attention runs between the parts of a layer, as
it is written: it reads the pass and the caches. A layer of Qwen3 launches 15 kernels; transformers launches 60.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from dflash_trt.device.fused import Fused
from dflash_trt.runtime.targets.merged_linear import merge_linear_layers
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
