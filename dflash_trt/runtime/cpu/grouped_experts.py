# SPDX-License-Identifier: Apache-2.0
"""Experts on a CPU, all of a layer in one call of C++; transformers has one of MKL or oneDNN for each expert."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dflash_trt import _C
from dflash_trt.runtime.cpu.kernel_call import LinearKernel, grouped
from dflash_trt.runtime.cpu.panel_linear import panels

LOG = logging.getLogger("dflash_trt.runtime.cpu")
EXPERTS = "dflash"
WEIGHTS = ("gate_up_proj", "down_proj")
LINEAR_KERNELS: dict[torch.dtype, LinearKernel] = {torch.float32: _C.linear_panels, torch.bfloat16: _C.linear_bfloat16}
Products = Callable[[Tensor, list[int]], Tensor]
"""rows [R, in], how many of them each expert has -> [R, out]"""


def group_experts(model: PreTrainedModel) -> None:
    """Replaces the model's experts by those below; weights are laid out layer by layer, in the place of its own."""
    modules = [module for module in model.modules() if hasattr(module, "has_gate")]
    if not modules:
        return
    if not all(map(_is_supported, modules)):
        LOG.warning("%s: its experts stay with transformers' products, which take longer", model.name_or_path)
        return
    for module in modules:
        module.products = {name: _products(module, name) for name in WEIGHTS}
    model.set_experts_implementation(EXPERTS)


def _is_supported(module: nn.Module) -> bool:
    """Whether its experts are whole, gated, and of a type that C++ multiplies with (transformers 5.23)."""
    if not module.has_gate or module._is_expert_parallel:
        return False
    weights: list[Tensor] = [getattr(module, name).data for name in WEIGHTS]
    return all(type(weight) is Tensor and weight.dtype in LINEAR_KERNELS for weight in weights)


def _products(module: nn.Module, name: str) -> Products:
    """Products with all experts' weights; frees the model's own where they had to be laid out."""
    own: Tensor = getattr(module, name).data
    weights = own.transpose(-1, -2) if module.is_transposed else own  # [E, out, in]
    bias = getattr(module, f"{name}_bias").data if module.has_bias else None
    num_outputs = weights.shape[-2]
    weights = panels(weights) if own.dtype == torch.float32 else weights.contiguous()
    if weights is not own:
        setattr(module, name, nn.Parameter(own.new_empty(0), requires_grad=False))
    return partial(grouped, LINEAR_KERNELS[own.dtype], weights, num_outputs, bias)


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts implementation of transformers (5.23): hidden_states [R, H], the others [R, K] -> [R, H]."""
    num_rows, top_k = top_k_index.shape
    order = top_k_index.flatten().argsort()
    counts = torch.bincount(top_k_index.flatten(), minlength=self.num_experts).tolist()
    gated = self._apply_gate(self.products["gate_up_proj"](hidden_states[order // top_k], counts))
    out = self.products["down_proj"](gated, counts)  # [R*K, H], expert by expert
    if self.has_post_expert_norm:
        out = self.post_expert_norm(out)
    weighted = out * top_k_weights.flatten()[order, None]
    back = torch.empty_like(weighted)
    back[order] = weighted
    return back.view(num_rows, top_k, -1).sum(dim=1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts)
