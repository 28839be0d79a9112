# SPDX-License-Identifier: Apache-2.0
"""Parts of a target's layers in fewer kernels than transformers launches: of 60 in a layer of Qwen3, 39 go.

RMSNorms are torch's own. Torch.compile makes a kernel each of the rotary embedding of q and of k, and of what an MLP or
an expert does between its products.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from dflash_trt.engine.fused import Fused

PROBE_ROWS = 4
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest difference, as a part of a value; in BF16 transformers rounds once more on the way."""
ROTARY = "apply_rotary_pos_emb"
"""Name of transformers' function for q and k, or what it begins with."""
MLP = ("gate_proj", "up_proj", "down_proj")
Normed = Callable[[Tensor, float, Tensor], Tensor]
"""rows [..., D] / sqrt(mean(rows^2) + eps) * factor [D], of factor, eps and rows."""


@torch.inference_mode()
def replace_norms(model: PreTrainedModel, normed: Normed) -> None:
    """Replaces the `forward` of each norm, in the model's type, that computes what `normed` does."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and _is_plain(module, model.dtype):
            _replace(module, normed)


def _is_plain(module: nn.Module, dtype: torch.dtype) -> bool:
    """Whether it has one weight [D] of this type, and takes nothing but rows."""
    weights = [weight.data for weight in module.parameters()]
    is_one = len(weights) == 1 and type(weights[0]) is Tensor and weights[0].ndim == 1 and weights[0].dtype == dtype
    return dtype in TOLERANCES and is_one and len(inspect.signature(type(module).forward).parameters) == 2


def _replace(module: nn.Module, normed: Normed) -> None:
    """Replaces its `forward`, if that is one of two formulas; BF16 would round the second one's factor."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    (weight,) = (parameter.data for parameter in module.parameters())
    rows = torch.randn(PROBE_ROWS, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    expected, tolerance = module(rows), TOLERANCES[weight.dtype]
    for factor in (weight, 1 + weight) if weight.dtype == torch.float32 else (weight,):
        if isinstance(eps, float) and torch.allclose(normed(factor, eps, rows), expected, tolerance, tolerance):
            module.forward = partial(normed, factor, eps)
            return


def torch_norm(factor: Tensor, eps: float, rows: Tensor) -> Tensor:
    """`Normed` by torch, which has a kernel for it on a GPU where both types are one (2.11)."""
    return F.rms_norm(rows, factor.shape, factor, eps)


@Fused
def silu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU of the gate, times up."""
    return F.silu(gate) * up


@Fused
def gelu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """GELU of the gate, by its approximation with tanh, times up."""
    return F.gelu(gate, approximate="tanh") * up


def fuse_layers(model: PreTrainedModel) -> None:
    """Replaces rotary embeddings, for all models of its classes, and gates of MLPs and experts; not on a CPU.

    Rotary embeddings and experts keep their own function, whatever it computes; an MLP is asked for its own.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        functions = vars(sys.modules[name])
        for rotary in [key for key in functions if key.startswith(ROTARY)]:
            if not isinstance(functions[rotary], Fused):
                functions[rotary] = Fused(functions[rotary])
    for module in model.modules():
        if hasattr(module, "_apply_gate"):
            module._apply_gate = MethodType(Fused(type(module)._apply_gate), module)
        elif all(isinstance(layer := getattr(module, name, None), nn.Linear) and _is_whole(layer) for name in MLP):
            _fuse_mlp(module, model.device)


def _is_whole(layer: nn.Linear) -> bool:
    """Whether its weight is no rank's part of another: a probe would wait for all ranks."""
    return type(layer.weight.data) is Tensor


@torch.inference_mode()
def _fuse_mlp(module: nn.Module, device: torch.device) -> None:
    """Replaces its `forward`, if that is one of two gates between three products, to the last bit."""
    gate, up, down = (getattr(module, name) for name in MLP)
    rows = torch.randn(PROBE_ROWS, gate.in_features, generator=torch.Generator().manual_seed(0))
    rows = rows.to(device, gate.weight.dtype)
    expected = module(rows)
    for gated in (silu_gated, gelu_gated):
        if torch.equal(down(gated.function(gate(rows), up(rows))), expected):
            module.forward = partial(_mlp, gate, up, down, gated)
            return


def _mlp(gate: nn.Module, up: nn.Module, down: nn.Module, gated: Fused, rows: Tensor) -> Tensor:
    return down(gated(gate(rows), up(rows)))  # type: ignore[no-any-return]
