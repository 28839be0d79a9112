# SPDX-License-Identifier: Apache-2.0
"""The drafter on ONNX Runtime: the engine directory's own graphs, lowered to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import RequestError
from dflash_trt.graph.cpu_session import cpu_session

FloatArray = npt.NDArray[np.float32]


class OnnxDrafter:
    """Holds the context cache [slots, L, C_max, G, D] FLOAT and runs both graphs in FLOAT."""

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        max_context_tokens: int,
        num_slots: int = 1,
        expose: Sequence[str] = (),
    ) -> None:
        """Creates both sessions; `manifest` is that of `directory`, read and checked by `read_manifest`.

        `expose` names values inside draft.onnx that `draft_values` may return.
        """
        self.spec: DraftSpec = manifest.draft
        self._context = cpu_session(directory, manifest.graphs["context"].file)
        self._draft = cpu_session(directory, manifest.graphs["draft"].file, expose)
        layers, heads, head_dim = len(self.spec.layers), self.spec.num_key_value_heads, self.spec.head_dim
        shape = (num_slots, layers, max_context_tokens, heads, head_dim)
        # Zeroed pages are mapped when they are first written: unused capacity costs nothing.
        self._k_cache = np.zeros(shape, dtype=np.float32)
        self._v_cache = np.zeros(shape, dtype=np.float32)
        self._lengths = np.zeros(num_slots, dtype=np.int32)

    def inject(self, slot: int, taps: torch.Tensor) -> None:
        """Appends context rows made from taps [T, A*H]; RequestError when the slot's capacity is exceeded."""
        begin = int(self._lengths[slot])
        end = begin + len(taps)
        if end > (capacity := self._k_cache.shape[2]):
            raise RequestError(f"slot {slot}: expected a context of at most {capacity} tokens, found {end}")
        positions = np.arange(begin, end, dtype=np.int32)
        feed = {"target_hidden": taps.float().numpy(), "positions": positions}
        k, v = self._context.run(["k", "v"], feed)  # [T, L, G, D]
        self._k_cache[slot, :, begin:end] = k.swapaxes(0, 1)
        self._v_cache[slot, :, begin:end] = v.swapaxes(0, 1)
        self._lengths[slot] = end

    def draft(self, slot: int, noise_embeds: torch.Tensor) -> torch.Tensor:
        """hidden [S, H] of the block with embeddings noise_embeds [S, H] right after the slot's context."""
        (hidden,) = self.draft_values(slot, noise_embeds, ["hidden"])
        return torch.from_numpy(hidden)

    def draft_values(self, slot: int, noise_embeds: torch.Tensor, names: Sequence[str]) -> list[FloatArray]:
        """The named values of one pass over a block as `draft` makes it, each [S, H]."""
        length = self._lengths[slot : slot + 1]
        feed = {
            "noise_embeds": noise_embeds.float().numpy()[None],
            "positions": length[:, None] + np.arange(len(noise_embeds), dtype=np.int32),
            "k_cache": self._k_cache,
            "v_cache": self._v_cache,
            "slot_ids": np.array([slot], dtype=np.int32),
            "context_lengths": length,
        }
        return [value[0] for value in self._draft.run(list(names), feed)]

    def context(self, slot: int) -> tuple[FloatArray, FloatArray]:
        """Views of the slot's injected k and v, each [L, C, G, D]."""
        length = self._lengths[slot]
        return self._k_cache[slot, :, :length], self._v_cache[slot, :, :length]

    def release(self, slot: int) -> None:
        """Empties a slot's context."""
        self._lengths[slot] = 0
