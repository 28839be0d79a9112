# SPDX-License-Identifier: Apache-2.0
"""Copies from the host to a GPU that the host does not wait for."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU's `tensor` as `device` copies it, with non_blocking=True, while the host goes on.

    Without, the host would wait for all that is queued before. Torch keeps pinned memory until the copy is done.
    """
    return tensor if device.type == "cpu" or tensor.device.type != "cpu" else tensor.pin_memory()


def uploaded(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU's `tensor` on `device`, for whose copy the host does not wait; any other where it is to be."""
    return pinned(tensor, device).to(device, non_blocking=True)
