# SPDX-License-Identifier: Apache-2.0
"""The node DFlashKVInjectionAttention, by `_C`: its kernel on a GPU, its reference on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dflash_trt import _C
from dflash_trt.engine.graph.draft_graph import PLUGIN_VERSION

ALIGNMENT = 16
"""Addresses must be multiples of this for the plugin; mapped weights lie anywhere."""
NOT_SIZES = ("plugin_namespace", "plugin_version")


def attention_call(attributes: Mapping[str, Any]) -> Callable[..., Tensor]:
    """The node's function of its inputs. Raises ValueError for attributes that are not those of this version."""
    if (version := attributes["plugin_version"].decode()) != PLUGIN_VERSION:
        raise ValueError(f"expected plugin_version {PLUGIN_VERSION}, found {version}")
    given = {name: value for name, value in attributes.items() if name not in NOT_SIZES}
    sizes = _C.KVInjectionAttributes(**given)
    _C.kv_injection_attention_check(sizes, 1, 1)
    width = given["num_heads"] * given["head_dim"]

    def attend(qkv: Tensor, *inputs: Tensor) -> Tensor:
        tensors = [qkv.contiguous(), *inputs]
        out = qkv.new_empty(len(qkv), width, dtype=torch.float8_e4m3fn if given["fp8_output"] else qkv.dtype)
        if not qkv.is_cuda:
            _C.kv_injection_attention_reference(sizes, [*map(_aligned, tensors)], out)
            return out
        num_bytes = _C.kv_injection_attention_workspace_bytes(sizes, tensors, out)
        workspace = torch.empty(max(1, num_bytes), dtype=torch.uint8, device=qkv.device)
        _C.kv_injection_attention(sizes, tensors, out, workspace, torch.cuda.current_stream().cuda_stream)
        return out

    return attend


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
