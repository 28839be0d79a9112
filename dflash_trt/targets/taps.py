# SPDX-License-Identifier: Apache-2.0
"""The hidden states that a draft reads, caught where they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel


class Taps:
    """Outputs of some decoder layers, one pass at a time.

    `output_hidden_states` gives the same tensors, but wraps every layer anew for each pass (transformers 5.23): half a
    millisecond, a fifth of a small target's pass.
    """

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int]) -> None:
        """Of a model whose decoder layers stand in `layers`, and give their output to the next as it is."""
        self._layer_ids = list(target_layer_ids)
        self._layers = model.get_decoder().layers
        self._caught: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def start(self, with_taps: bool) -> None:
        """Before a pass: whether its taps are wanted. Torch calls a layer with a hook by a longer way."""
        if with_taps and not self._hooks:
            self._hooks = [
                self._layers[index].register_forward_hook(partial(self._catch, index)) for index in {*self._layer_ids}
            ]
        elif not with_taps:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def take(self) -> Tensor:
        """Taps [R, A*H] of the pass, in the order of the layer ids."""
        taps = torch.cat([self._caught[index][0] for index in self._layer_ids], dim=-1)
        self._caught.clear()
        return taps

    def _catch(self, index: int, layer: nn.Module, arguments: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._caught[index] = output[0] if isinstance(output, tuple) else output
