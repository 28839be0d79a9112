# SPDX-License-Identifier: Apache-2.0
"""A draft's own embedding and lm_head, and the target's tokens that their rows stand for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflash_trt.checkpoint.draft_spec import D2T, EMBEDDING, HEAD, DraftSpec, PartialDraftSpec
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import StoredTensor, Weights

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T2D = "t2d"


def own_vocabulary(config: Facts, weights: Weights, vocab_size: int) -> dict[str, Any]:
    """Whether embedding and head are the draft's own, by has_embed_tokens and has_lm_head or else by its tensors."""
    has_head = config.flag("has_lm_head", default=f"{HEAD}.weight" in weights)
    rows = config.optional("draft_vocab_size", config.integer) or vocab_size
    if rows > vocab_size or (rows < vocab_size and not has_head):
        raise config.conflict("draft_vocab_size", f"vocab_size {vocab_size}, or less with an lm_head")
    return {
        "own_embedding": config.flag("has_embed_tokens", default=EMBEDDING in weights),
        "draft_vocab_size": rows if has_head else None,
    }


def without_t2d(weights: Weights, spec: DraftSpec) -> Weights:
    """The tensors without t2d, which is redundant; CheckpointError where it contradicts d2t."""
    left = dict(weights)
    if spec.has_d2t and T2D in left and D2T in left:
        _check_t2d(left.pop(T2D), left[D2T], spec)
    return left


def _check_t2d(t2d: StoredTensor, d2t: StoredTensor, spec: DraftSpec) -> None:
    """Raises CheckpointError unless t2d marks the tokens that d2t names; d2t is checked with the other tensors."""
    if (t2d.dtype, t2d.shape) != ("BOOL", (spec.vocab_size,)):
        raise t2d.error(f"BOOL {[spec.vocab_size]}")
    if (d2t.dtype, d2t.shape) != ("I64", (spec.draft_vocab_size,)):
        return
    import numpy as np

    marked = np.memmap(t2d.file, "u1", mode="r", offset=t2d.offset, shape=t2d.shape)
    offsets = np.memmap(d2t.file, "<i8", mode="r", offset=d2t.offset, shape=d2t.shape)
    named = np.sort(offsets + np.arange(len(offsets)))
    if not np.array_equal(np.flatnonzero(marked), named):
        raise t2d.error(f"the {len(named)} tokens that d2t names", f"{int(np.count_nonzero(marked))} others")


def head_token_ids(spec: PartialDraftSpec, weights: Mapping[str, StoredTensor]) -> NDArray[np.int32] | None:
    """The target's token id of each row [V'] of the own head, row + d2t[row]; None where row i is token i.

    Agrees with vLLM 0.32. Raises CheckpointError for a token outside of the vocabulary or in two rows.
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
        vocabulary = f"row + d2t[row] in the vocabulary, 0 to {(spec.vocab_size or 0) - 1}"
        raise tensor.error(vocabulary, f"{row} + {offsets[row]}")
    token_ids: NDArray[np.int32] = (rows + offsets).astype(np.int32)
    unique, counts = np.unique(token_ids, return_counts=True)
    if len(unique) < len(token_ids):
        twice = int((counts > 1).argmax())
        raise tensor.error("each token in one row", f"{unique[twice]} in {counts[twice]}")
    return token_ids
