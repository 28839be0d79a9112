# SPDX-License-Identifier: Apache-2.0
"""The hidden states that a draft reads, caught where they are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

Forward = Callable[..., Tensor | tuple[Tensor, ...]]


class Taps:
    """Outputs of some decoder layers, one pass at a time.

    `output_hidden_states` gives the same, but wraps every layer anew for each pass (transformers 5.23): half a
    millisecond.
    """

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int]) -> None:
        """Of a model whose decoder layers stand in `layers`, and give their output to the next as it is."""
        self._layer_ids = list(target_layer_ids)
        self._layers = model.get_decoder().layers
        self._caught: dict[int, Tensor] = {}
        self._forwards: dict[int, Forward] = {}
        """The layers' own, by layer, while taps are caught."""

    def start(self, with_taps: bool) -> None:
        """Before a pass: whether its taps are wanted. No hooks: torch calls a layer that has one by a longer way."""
        if with_taps and not self._forwards:
            for index in {*self._layer_ids}:
                layer = self._layers[index]
                self._forwards[index] = layer.forward
                layer.forward = partial(self._catch, index, layer.forward)
        elif not with_taps and self._forwards:
            for index, forward in self._forwards.items():
                self._layers[index].forward = forward
            self._forwards = {}

    def take(self) -> list[Tensor]:
        """Those of the pass, [1, R, H] each, in the order of the layer ids."""
        taps = [self._caught[index] for index in self._layer_ids]
        self._caught.clear()
        return taps

    def _catch(self, index: int, forward: Forward, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        output = forward(*args, **kwargs)
        self._caught[index] = output[0] if isinstance(output, tuple) else output
        return output
