# SPDX-License-Identifier: Apache-2.0
"""Experts in FP32 on a CPU, all of a layer in one call, with weights in panels as `panel_linear` has them.

Transformers' grouped products come down to one of MKL for each expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from dflash_trt.targets.panel_linear import grouped_linear, panels, suits

EXPERTS = "panels"
WEIGHTS = ("gate_up_proj", "down_proj")


def lay_out_experts(model: PreTrainedModel) -> None:
    """Lays out the weights of experts, layer by layer, in the place of the model's own.

    Does nothing where the model does not suit, for experts that are spread over ranks, and for those without a gate.
    """
    if not suits(model):
        return
    found = False
    for module in model.modules():
        if _is_known(module):
            module.in_panels = {name: _laid_out(module, name) for name in WEIGHTS}
            found = True
    if found:
        model.set_experts_implementation(EXPERTS)


def _is_known(module: nn.Module) -> bool:
    """Whether its experts are as transformers (5.23) knows them, and here."""
    if not getattr(module, "has_gate", False) or module._is_expert_parallel:
        return False
    return all(type(getattr(module, name).data) is Tensor for name in WEIGHTS)


def _laid_out(module: nn.Module, name: str) -> tuple[Tensor, int]:
    """Panels of all experts' weights [out, in], and out; the module's own are let go."""
    weights = getattr(module, name).data
    setattr(module, name, nn.Parameter(weights.new_empty(0), requires_grad=False))
    if module.is_transposed:
        weights = weights.transpose(-1, -2)
    return panels(weights), weights.shape[-2]


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts implementation of transformers (5.23).

    hidden_states [R, H], top_k_index and top_k_weights [R, K] -> [R, H].
    """
    if not hasattr(self, "in_panels"):
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
    laid_out, num_outputs = self.in_panels[name]
    bias = getattr(self, f"{name}_bias").data if self.has_bias else None
    return grouped_linear(laid_out, num_outputs, bias, rows, counts)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts)
