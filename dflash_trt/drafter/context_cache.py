# SPDX-License-Identifier: Apache-2.0
"""The context cache on the device, and how many rows each slot holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_trt import _C
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.graphs import graph_signatures
from dflash_trt.errors import RequestError


class ContextCache:
    """K and V [slots, L, C, G, D], FLOAT, BF16 or FP8; scales are part of the graphs."""

    def __init__(
        self, spec: DraftSpec, num_slots: int, num_rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        ports = {port.name: port for port in graph_signatures(spec, fp8_cache=False)["draft"].inputs}
        shape = ports["k_cache"].sizes({"slots": num_slots, "C_max": num_rows})
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.lengths = [0] * num_slots

    @property
    def num_rows(self) -> int:
        """C: what each slot has room for."""
        return self.k.shape[2]

    @property
    def bytes_per_token(self) -> int:
        """What one row of one slot takes."""
        return self.k[0, :, 0].nbytes + self.v[0, :, 0].nbytes

    def rows(self, slot: int) -> tuple[Tensor, Tensor]:
        """Views of the slot's injected k and v, each [L, C, G, D]."""
        length = self.lengths[slot]
        return self.k[slot, :, :length], self.v[slot, :, :length]

    def grow(self, num_rows: int) -> None:
        """Makes room for `num_rows` rows a slot, at least twice what was there: `k` and `v` are new tensors."""
        missing = max(num_rows, 2 * self.num_rows) - self.num_rows
        self.k, self.v = (F.pad(cache, (0, 0, 0, 0, 0, missing)) for cache in (self.k, self.v))

    def extend(self, slots: Sequence[int], num_rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Lengthens the slots; the slot and the position of each new row. RequestError when one would overflow."""
        for slot, count in zip(slots, num_rows, strict=True):
            if self.lengths[slot] + count > self.num_rows:
                raise RequestError(
                    f"context of slot {slot}: expected at most {self.num_rows} rows, for which the plan was built,"
                    f" found {self.lengths[slot]} and {count} new ones",
                    hint="build the plan with a larger --max-seq-len",
                )
        rows: list[int] = []
        positions: list[int] = []
        for slot, count in zip(slots, num_rows, strict=True):
            rows += [slot] * count
            positions += range(self.lengths[slot], self.lengths[slot] + count)
            self.lengths[slot] += count
        return rows, positions

    def write(self, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts rows k, v [T, L, G, D] where `slots` and `positions` [T] INT32 say.

        On a GPU in one launch, where the kernels were compiled in; else in two, with torch's copies of what they index.
        """
        if self.k.is_cuda and _C.cuda_architectures():
            with torch.cuda.device(self.k.device):
                stream = torch.cuda.current_stream().cuda_stream
                _C.kv_injection_append(k, v, slots, positions, self.k, self.v, stream)
            return
        for cache, rows in ((self.k, k), (self.v, v)):
            _bytes(cache)[slots, :, positions] = _bytes(rows)

    @torch.inference_mode()  # as whoever lets it grow
    def clear(self, slot: int) -> None:
        """Empties a slot: zeros, because a masked row still takes part as 0 * value, and 0 * NaN is NaN."""
        for rows in self.rows(slot):
            _bytes(rows).zero_()
        self.lengths[slot] = 0


def _bytes(tensor: Tensor) -> Tensor:
    """FP8 as bytes, because torch moves those by index and FP8 not everywhere."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
