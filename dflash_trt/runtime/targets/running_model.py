# SPDX-License-Identifier: Apache-2.0
"""Base of both ways to run a target on transformers: embeddings, lm_head and taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from dflash_trt.device.upload import uploaded
from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.targets.target import Target, Verified


class HuggingFaceTarget(Target):
    """Target on a transformers model: embeddings, lm_head and taps."""

    is_batch_invariant = False
    """Whether a token's numbers were found to be the same, to the bit, whatever else is in its pass; asked in BF16."""

    def __init__(
        self, model: PreTrainedModel, target_layer_ids: Sequence[int], tap_hidden_size: int | None = None
    ) -> None:
        """`tap_hidden_size` is the width of a tap, by default the model's hidden size: several residual streams of a
        target are averaged to that, as vLLM 0.33 and SGLang 0.5.23 do, or laid side by side where it is as wide."""
        self.model = model
        self.target_layer_ids = list(target_layer_ids)
        config = model.config.get_text_config()
        self.tap_hidden_size = tap_hidden_size or int(config.hidden_size)
        self.vocab_size = int(config.vocab_size)
        self._device, self._dtype = model.device, model.dtype  # asked of the model, each walks its parameters
        self._embedding = model.get_input_embeddings()
        self._embed_scale = float(getattr(self._embedding, "embed_scale", 1.0))  # Gemma's table multiplies by sqrt(H)
        self._lm_head = model.get_output_embeddings()
        # hidden_states[0] are the embeddings: decoder layer i's output stands at i + 1 (trap 1).
        self._taps = [layer + 1 for layer in target_layer_ids]
        accepted = signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"  # transformers 5.24, and before
        forwards = (model.forward, *([decoder.forward] if (decoder := model.get_decoder()) is not None else []))
        self._takes_positions = any("position_ids" in signature(forward).parameters for forward in forwards)
        """Bamba, for one, counts from 0 in each pass without them."""
        self._cache_after: Any = None
        """The cache that the last pass returned."""
        self._catcher: Taps | None = None
        """Source of taps instead of hidden_states, where the model's layers are known."""

    @property
    def summary(self) -> str:
        """One line: the model's family, dtype and device, and how its attention and caches are computed."""
        dtype = str(self._dtype).removeprefix("torch.")
        return f"target: {self.model.config.model_type} in {dtype} on {self._device}: {self._computed()}"

    def _computed(self) -> str:
        """Attention and cache, in words."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees the model and its caches now; the last call.

        Taps, layers that were replaced and hooks of a model on several GPUs are reference cycles.
        """
        for module in list(self.model.modules()):
            vars(module).clear()
        vars(self).clear()

    @torch.inference_mode()
    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., H] of the embedding table as they are stored: a draft says its own factor."""
        embeddings: torch.Tensor = self._embedding(uploaded(token_ids, self._device))
        return embeddings if self._embed_scale == 1 else embeddings / self._embed_scale

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The lm_head's logits [..., V], in the model's type: a drafter may compute in another."""
        logits: torch.Tensor = self._lm_head(hidden.to(self._dtype))
        return logits.to(hidden.device)

    @torch.no_grad()
    def head(self) -> dict[str, torch.Tensor]:
        """The lm_head's tensors: `lm_head` [V, H], and `lm_head_bias` [V] where it has one.

        Raises CheckpointError for a head that is more than a matrix.
        """
        if not isinstance(self._lm_head, torch.nn.Linear) or self._lm_head.weight.dtype != self._dtype:
            raise CheckpointError(
                f"{self.model.name_or_path}: expected an lm_head that is a linear layer, found"
                f" {type(self._lm_head).__name__}"
            )
        tensors = {"lm_head": self._lm_head.weight, "lm_head_bias": self._lm_head.bias}
        return {name: _whole(tensor).detach() for name, tensor in tensors.items() if tensor is not None}

    def _forward(
        self, token_ids: Sequence[int], logits_rows: Sequence[int], *, with_taps: bool, **inputs: Any
    ) -> Verified:
        """One forward call over `token_ids`, with logits of the rows `logits_rows`.

        Adjacent rows are passed as a slice, which has no device: a tensor would not be on the last layers' GPU.
        """
        begin = next(iter(logits_rows), 0)
        run = range(begin, begin + len(logits_rows))
        is_run = list(logits_rows) == list(run)
        kept = slice(run.start, run.stop) if is_run else uploaded(torch.tensor(logits_rows), self._device)
        ids = uploaded(torch.from_numpy(np.array([token_ids])), self._device)
        verified = self._run(ids, kept, with_taps=with_taps, **inputs)
        return replace(verified, logits=verified.logits.float())

    def _run(
        self, token_ids: Tensor, logits_to_keep: int | slice | Tensor, *, with_taps: bool, **inputs: Any
    ) -> Verified:
        """One forward call over token_ids [1, R]: logits in the model's type, of the last rows, or of all for 0."""
        if self._catcher is not None:
            self._catcher.start(with_taps)
        with torch_attention(self._device):
            output = self.model(
                token_ids,
                output_hidden_states=with_taps and self._catcher is None,
                logits_to_keep=logits_to_keep,
                **inputs,
            )
        self._cache_after = getattr(output, self._cache_argument, None)
        logits = output.logits[0].to(self._device)  # on the last layers' GPU, if a target is spread
        if not with_taps:
            return Verified(logits=logits)
        if self._catcher is not None:
            return Verified(logits=logits, tapped=self._catcher.take())
        return Verified(
            logits=logits, tapped=[self._tap(output.hidden_states[tap].to(self._device)) for tap in self._taps]
        )

    def _tap(self, hidden: Tensor) -> Tensor:
        """hidden [1, R, W], or [1, R, streams, H] -> [1, R, tap_hidden_size]."""
        if hidden.dim() < 4:
            return hidden
        return hidden.mean(2) if self.tap_hidden_size == hidden.shape[-1] else hidden.flatten(2)


TORCH_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def torch_attention(device: torch.device) -> AbstractContextManager[Any]:
    """Context in which a GPU's attention is torch's own, not cuDNN's, and whose other threads' is, too.

    On compute capability 9 and 10 torch 2.11 takes cuDNN's first, which makes a plan for every new shape of a context,
    tens of milliseconds each, and never frees one.
    """
    return nullcontext() if device.type == "cpu" else sdpa_kernel(TORCH_KERNELS)


def _whole(tensor: Tensor) -> Tensor:
    """`tensor`, gathered from all ranks where each has a shard of it."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Forward = Callable[..., Tensor | tuple[Tensor, ...]]


class Taps:
    """Outputs of some decoder layers, one pass at a time.

    `output_hidden_states` gives the same, but wraps every layer anew for each pass (transformers 5.23): half a
    millisecond.
    """

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int]) -> None:
        """Expects a model whose decoder has `layers`, each of which passes its output on unchanged."""
        self._layer_ids = list(target_layer_ids)
        self._layers = model.get_decoder().layers
        self._caught: dict[int, Tensor] = {}
        self._forwards: dict[int, Forward] = {}
        """The layers' own, by layer, while taps are caught."""

    def start(self, with_taps: bool) -> None:
        """Prepares a pass with or without taps. Hooks would make torch's calls of a layer slower."""
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
        """Taps of the pass, [1, R, H] each, in the order of the layer ids."""
        taps = [self._caught[index] for index in self._layer_ids]
        self._caught.clear()
        return taps

    def _catch(self, index: int, forward: Forward, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        output = forward(*args, **kwargs)
        self._caught[index] = output[0] if isinstance(output, tuple) else output
        return output
