# SPDX-License-Identifier: Apache-2.0
"""Copies from the host to a GPU that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU's `tensor` in pinned memory, from which `device` copies with non_blocking=True while the host goes on.

    From other memory, the host would wait for all queued work. Torch keeps pinned memory until the copy is done.
    """
    return tensor if device.type == "cpu" or tensor.device.type != "cpu" else tensor.pin_memory()


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; the host does not wait for the copy."""
    return tensor if tensor.device == device else pinned(tensor, device).to(device, non_blocking=True)
