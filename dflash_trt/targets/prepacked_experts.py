# SPDX-License-Identifier: Apache-2.0
"""Experts with weights in oneDNN's own layout, on a CPU in FP32, as `prepacked_linear` has them for linear layers.

Transformers' grouped products come down to one of MKL for each expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from dflash_trt.targets.prepacked_linear import MIN_BYTES, can_prepack, product, reordered

EXPERTS = "prepacked"
WEIGHTS = ("gate_up_proj", "down_proj")


def prepack_experts(model: PreTrainedModel) -> None:
    """Lays out the weights of experts of MIN_BYTES and more, layer by layer, in the place of the model's own.

    Does nothing where `prepack` does nothing, for experts that are spread over ranks, and for those without a gate.
    """
    if not can_prepack(model):
        return
    found = False
    for module in model.modules():
        if _is_large(module):
            module.prepacked = {name: _laid_out(module, name) for name in WEIGHTS}
            found = True
    if found:
        model.set_experts_implementation(EXPERTS)


def _is_large(module: nn.Module) -> bool:
    """Whether its experts are as transformers (5.23) knows them, here, and worth it."""
    if not getattr(module, "has_gate", False) or module._is_expert_parallel:
        return False
    weights = [getattr(module, name) for name in WEIGHTS]
    return all(type(weight.data) is Tensor and weight[0].nbytes >= MIN_BYTES for weight in weights)


def _laid_out(module: nn.Module, name: str) -> list[Tensor]:
    """Of each expert a weight [out, in]; the module's own is let go."""
    weights = getattr(module, name).data
    setattr(module, name, nn.Parameter(weights.new_empty(0), requires_grad=False))
    return [reordered(weight.T.contiguous() if module.is_transposed else weight) for weight in weights]


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts implementation of transformers (5.23).

    hidden_states [R, H], top_k_index and top_k_weights [R, K] -> [R, H].
    """
    if not hasattr(self, "prepacked"):
        mixed: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return mixed
    num_rows, top_k = top_k_index.shape
    order = top_k_index.flatten().argsort()
    counts = torch.bincount(top_k_index.flatten(), minlength=self.num_experts).tolist()
    gated = self._apply_gate(_products(self, "gate_up_proj", hidden_states[order // top_k], counts))
    out = _products(self, "down_proj", gated, counts)  # [R*K, H], expert by expert
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    back = torch.empty_like(out)
    back[order] = out * top_k_weights.flatten()[order, None]
    return back.view(num_rows, top_k, -1).sum(dim=1)


def _products(self: Any, name: str, rows: Tensor, counts: list[int]) -> Tensor:
    """rows [R*K, in], counts[e] of them for expert e -> [R*K, out]."""
    biases = getattr(self, f"{name}_bias") if self.has_bias else [None] * len(counts)
    parts = zip(torch.split(rows, counts), self.prepacked[name], biases, strict=True)
    return torch.cat([product(weight, bias, part) for part, weight, bias in parts if len(part)])


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts)
