# SPDX-License-Identifier: Apache-2.0
"""Which tokens the rows of a draft's own lm_head are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dflash_trt.checkpoint.draft_spec import D2T, PartialDraftSpec
from dflash_trt.checkpoint.safetensors_file import Tensor
from dflash_trt.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def head_token_ids(spec: PartialDraftSpec, weights: Mapping[str, Tensor]) -> NDArray[np.int32] | None:
    """The target's token id of each row [V'] of the own head, row + d2t[row]; None where row i is token i.

    As vLLM 0.32 reads it. Raises CheckpointError for one outside of the vocabulary, or a token in two rows.
    """
    if not spec.has_d2t:
        return None
    import numpy as np

    tensor = weights[D2T]
    offsets = np.memmap(tensor.file, "<i8", mode="r", offset=tensor.offset, shape=tensor.shape)
    rows = np.arange(len(offsets))
    outside = (offsets < -rows) | (offsets >= (spec.vocab_size or 0) - rows)
    if outside.any():
        row = int(outside.argmax())
        raise CheckpointError(
            f"{tensor.file}: tensor {D2T!r}: expected row + d2t[row] in the vocabulary, 0 to"
            f" {(spec.vocab_size or 0) - 1}, found {row} + {offsets[row]}"
        )
    token_ids: NDArray[np.int32] = (rows + offsets).astype(np.int32)
    unique, counts = np.unique(token_ids, return_counts=True)
    if len(unique) < len(token_ids):
        twice = int((counts > 1).argmax())
        raise CheckpointError(
            f"{tensor.file}: tensor {D2T!r}: expected each token in one row, found {unique[twice]} in {counts[twice]}"
        )
    return token_ids
