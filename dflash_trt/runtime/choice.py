# SPDX-License-Identifier: Apache-2.0
"""The target's own tokens, chosen where its logits lie, and the rows that the host needs itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dflash_trt.runtime.sampling import HEAVIEST, RowDraw, sample

Rows = npt.NDArray[np.float32]


def choose(logits: Tensor, draws: Sequence[RowDraw] = ()) -> tuple[list[int], list[bool]]:
    """The target's own token [n] by each row of logits [n, V], and whether the row is finite.

    On a GPU, tokens of the rows that `draws` name are sampled. All others are the argmax, in which a NaN is largest.
    Waits for a GPU once, and again where a filter leaves many tokens.
    """
    if logits.device.type == "cpu":
        rows = _numpy(logits)
        tokens = rows.argmax(axis=-1)
        return tokens.tolist(), np.isfinite(rows[np.arange(len(rows)), tokens]).tolist()
    best, chosen = logits.max(dim=-1)
    for heaviest in (HEAVIEST, logits.shape[-1]):
        sample(logits, best, draws, chosen, heaviest)
        choices, finite = torch.stack([chosen, best.isfinite().to(chosen.dtype)]).tolist()
        draws = [draw for draw in draws if choices[draw.row] < 0]
        if not draws:
            break
    return choices, [bool(number) for number in finite]


def _numpy(logits: Tensor) -> Rows:
    """NumPy finds an argmax in a third to a fifth of torch's time (2.13), and has no BF16."""
    rows: Rows = logits.float().numpy()
    return rows


def rows_here(logits: Tensor, places: Sequence[range]) -> list[Rows]:
    """Rows of logits [R, V] FLOAT at places, in the host's memory; from a GPU after the host has next waited for it.

    They come in one copy, and into pinned memory, as torch takes for a copy that is not waited for.
    """
    if logits.device.type == "cpu":
        rows = _numpy(logits)
        return [rows[place.start : place.stop] for place in places]
    chosen, lengths = [logits[place.start : place.stop] for place in places], [len(place) for place in places]
    copied = torch.cat(chosen).to("cpu", non_blocking=True) if any(lengths) else torch.empty(0, logits.shape[-1])
    return np.split(copied.numpy(), np.cumsum(lengths[:-1]))
