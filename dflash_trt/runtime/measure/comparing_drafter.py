# SPDX-License-Identifier: Apache-2.0
"""A drafter that measures its numerical errors against a reference while it drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.engine.graph.draft_graph import output_name
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.measure.statistics import relative_error
from dflash_trt.runtime.measure.verification_report import DrafterError, LayerError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

BLOCKS_APART = 8
"""Blocks 0, 8, 16, ... of a prompt are compared: neighbours see nearly the same context."""


def exposed_values(spec: DraftSpec) -> list[str]:
    """The values inside draft.onnx that a comparison reads."""
    return [output_name(layer) for layer in range(len(spec.layers))]


class ComparingDrafter(Drafter):
    """A drafter that runs `reference` beside it on the same input, for one request at a time.

    Each makes its own context from the taps. Both must have been opened with `exposed_values`.
    """

    def __init__(self, drafter: Drafter, reference: Drafter) -> None:
        super().__init__(drafter.executor, drafter.spec, drafter.cache, drafter.embedding, drafter.scorer)
        self.cache_bytes_per_token += reference.cache_bytes_per_token
        self._reference = reference
        self._blocks = 0
        self._errors: list[list[float]] = []  # [blocks, L + 1 + 2 * L]: values, then k, then v by layer

    def reserve(self, slot: int, pages: Sequence[int], num_rows: int) -> None:
        """Reserves the same pages for both contexts."""
        super().reserve(slot, pages, num_rows)
        self._reference.reserve(slot, pages, num_rows)

    def inject(
        self, slots: Sequence[int], num_rows: Sequence[int], taps: torch.Tensor, rows: NDArray[np.int64] | None = None
    ) -> None:
        """Appends context rows made from the taps [T, A*H] to both contexts."""
        super().inject(slots, num_rows, taps, rows)
        self._reference.inject(slots, num_rows, taps, rows)

    def run(self, slots: Sequence[int], noise_embeds: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The drafter's outputs; every BLOCKS_APART-th block is compared with the reference's."""
        outputs = super().run(slots, noise_embeds)
        if self._blocks % BLOCKS_APART == 0:
            self._compare(slots, outputs, self._reference.run(slots, noise_embeds))
        self._blocks += 1
        return outputs

    def release(self, slot: int) -> None:
        """Empties a slot's context and counts blocks from 0 again."""
        self._blocks = 0
        super().release(slot)
        self._reference.release(slot)

    def error(self) -> DrafterError | None:
        """The errors so far; None before the first block."""
        if not self._errors:
            return None
        num_layers = len(self.spec.layers)
        means = np.mean(self._errors, axis=0).tolist()
        outputs, (hidden, *context) = means[:num_layers], means[num_layers:]
        rows = zip(outputs, context[:num_layers], context[num_layers:], strict=True)
        layers = [LayerError(layer=i, output=output, k=k, v=v) for i, (output, k, v) in enumerate(rows)]
        return DrafterError(num_blocks=len(self._errors), layers=layers, hidden=hidden)

    def _compare(
        self, slots: Sequence[int], outputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> None:
        names = [*exposed_values(self.spec), "hidden"]
        errors = [relative_error(outputs[name], expected[name]) for name in names]
        (slot,) = slots
        for kv, reference_kv in zip(self.cache.rows(slot), self._reference.cache.rows(slot), strict=True):
            errors += [relative_error(*layer) for layer in zip(kv, reference_kv, strict=True)]
        self._errors.append(errors)
