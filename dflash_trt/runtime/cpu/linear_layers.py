# SPDX-License-Identifier: Apache-2.0
"""Linear layers and experts of targets on a CPU, in C++ (cpp/linear): one kernel for any number of rows.

A row's sum does not depend on the others (`runtime/targets/packed_target.py`).

FP32: weights are laid out once, 16 columns of the product side by side, which MKL does in each call: for the few rows
of a decode step that takes longer than multiplying. BF16: oneDNN (3.12, torch 2.13) takes twice as long for up to 8
rows, as long for 64, and 0.8 of it for a prompt's 512. Experts: all of a layer in one call, where transformers has one
of MKL or oneDNN for each. The kernels run on torch's threads: a second pool would spin against them.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from dflash_trt import _C

LOG = logging.getLogger("dflash_trt.runtime.cpu")
LinearKernel = Callable[..., None]
"""`_C.linear_panels` or `_C.linear_bfloat16`."""


def one_weight(kernel: LinearKernel, weight: Tensor, num_outputs: int, bias: Tensor | None, rows: Tensor) -> Tensor:
    """rows [..., in] by a weight, and bias [out] -> [..., out]."""
    out = rows.new_empty(*rows.shape[:-1], num_outputs)
    num_inputs = rows.shape[-1]
    _call(kernel, (rows.numel() // num_inputs,), weight, bias, rows, out)
    return out


def grouped(
    kernel: LinearKernel, weights: Tensor, num_outputs: int, biases: Tensor | None, rows: Tensor, counts: Sequence[int]
) -> Tensor:
    """rows [R, in], counts[e] of them by weights[e] and biases[e] of [E, out], end to end -> [R, out]."""
    out = rows.new_empty(len(rows), num_outputs)
    _call(kernel, counts, weights, biases, rows, out)
    return out


def _call(
    kernel: LinearKernel, counts: Sequence[int], weight: Tensor, bias: Tensor | None, rows: Tensor, out: Tensor
) -> None:
    rows = rows.contiguous()
    bias_at = 0 if bias is None else bias.data_ptr()
    x, weight_at, out_at = rows.data_ptr(), weight.data_ptr(), out.data_ptr()
    kernel(x, counts, weight_at, out.shape[-1], rows.shape[-1], bias_at, out_at, *openmp_team())


def openmp_team() -> tuple[int, int]:
    """Number of threads, and the address of GOMP_parallel in torch's OpenMP library, or 0: then C++ uses one."""
    return torch.get_num_threads(), _gomp_parallel()


@cache
def _gomp_parallel() -> int:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.cast(ctypes.CDLL(str(library)).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


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
        return F.linear(rows, weight, bias)  # the error names the problem
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
            return F.linear(rows, self.weight, self.bias)  # the error names the problem
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
    """A weight [..., out, in] as [..., out / 16 rounded up, in, 16], padded with zeros."""
    if behind := -weight.shape[-2] % _C.PANEL:
        weight = F.pad(weight, (0, 0, 0, behind))
    *above, num_rows, num_inputs = weight.shape
    return weight.view(*above, num_rows // _C.PANEL, _C.PANEL, num_inputs).transpose(-1, -2).contiguous()


def rows_of(panels: Tensor, num_outputs: int) -> Tensor:
    """A weight [out, in] of panels."""
    return panels.transpose(-1, -2).flatten(0, 1)[:num_outputs].contiguous()


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
