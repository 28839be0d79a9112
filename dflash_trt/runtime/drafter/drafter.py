# SPDX-License-Identifier: Apache-2.0
"""The running draft model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import EMBEDDING, MASK_EMBEDDING, DraftSpec
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.device.upload import uploaded
from dflash_trt.engine.candidate_lattice import Candidates
from dflash_trt.engine.candidate_scorer import CandidateScorer
from dflash_trt.engine.executor import DraftInputs, Executor
from dflash_trt.runtime.kvcache.paged_caches import ContextCache

Embed = Callable[[Tensor], Tensor]


class DraftEmbedding:
    """What an engine holds of an embedding: a whole table, the row of the mask token, both, or neither."""

    def __init__(self, mask_token_id: int, table: Tensor | None = None, mask_row: Tensor | None = None) -> None:
        """`table` is [V, H], `mask_row` [H], any floats."""
        self._mask_token_id = mask_token_id
        self._table = table
        self._mask_row = mask_row
        self._blocks: Tensor | None = None

    @classmethod
    def read(cls, engine: Path, spec: DraftSpec, device: torch.device) -> DraftEmbedding:
        """The embedding of the directory `engine`, in its stored dtype; on a CPU it stays in the file."""
        with safe_open(engine / SINGLE, framework="pt", device=str(device)) as tensors:
            table = tensors.get_tensor(EMBEDDING) if spec.own_embedding else None
            mask_row = tensors.get_tensor(MASK_EMBEDDING) if spec.mask_embedding else None
        return cls(spec.mask_token_id, table, mask_row)

    def blocks(self, anchors: Tensor, block_size: int, borrowed: Embed) -> Tensor:
        """Embeddings [B, S, H] of the blocks [anchor, mask, mask, ...] of token ids `anchors` [B] int64.

        The next call overwrites them: the mask rows are computed once, by the first `borrowed`.
        """
        if self._blocks is None or len(self._blocks) < len(anchors):
            masks = self.rows(torch.full((len(anchors), block_size), self._mask_token_id), borrowed)
            self._blocks = masks.contiguous()
        blocks = self._blocks[: len(anchors)]
        blocks[:, 0] = self.rows(anchors, borrowed)
        return blocks

    def rows(self, token_ids: Tensor, borrowed: Embed) -> Tensor:
        """Embeddings [..., H] of token ids [...] int64; `borrowed` is the target's embedding, own rows are FLOAT."""
        if self._table is None:
            rows = borrowed(token_ids)
        else:
            rows = torch.nn.functional.embedding(uploaded(token_ids, self._table.device), self._table).float()
        if self._mask_row is None:
            return rows
        is_mask = uploaded(token_ids == self._mask_token_id, rows.device)
        return torch.where(is_mask[..., None], self._mask_row.to(rows), rows)


Head = Callable[[Tensor], Tensor]
"""Logits [..., V] of final hidden rows [..., H]."""


class Drafter:
    """A context for each slot, and one pass for the blocks of all of them. No call waits for a GPU on its own."""

    def __init__(
        self,
        executor: Executor,
        spec: DraftSpec,
        cache: ContextCache,
        embedding: DraftEmbedding | None = None,
        scorer: CandidateScorer | None = None,
    ) -> None:
        """`executor` is bound to `cache`; `embedding` and `scorer` are the draft's own, if it has any."""
        self.executor = executor
        self.spec = spec
        self.cache = cache
        self.embedding = embedding or DraftEmbedding(spec.mask_token_id)
        self.scorer = scorer
        self.cache_bytes_per_token = cache.bytes_per_token
        """Bytes of one context row of one slot."""

    @classmethod
    def open(
        cls,
        executor: Executor,
        spec: DraftSpec,
        *,
        num_slots: int = 1,
        embedding: DraftEmbedding | None = None,
        scorer: CandidateScorer | None = None,
    ) -> Drafter:
        """Loads the executor and gives it a context cache. Raises what `Executor.cache_rows` and `load` raise."""
        num_rows = executor.cache_rows(num_slots)
        executor.load()
        cache = ContextCache(spec, num_slots, num_rows, executor.cache_dtype, executor.device)
        executor.bind(cache.k, cache.v)
        return cls(executor, spec, cache, embedding, scorer)

    def allocate(self, num_pages: int) -> None:
        """Takes a GPU's memory for so many pages; a CPU's, and that for more, is taken as they are written."""
        if self.executor.device.type != "cpu":
            self.cache.make_room(num_pages)
            self.executor.bind(self.cache.k, self.cache.v)

    def reserve(self, slot: int, pages: Sequence[int], num_rows: int) -> None:
        """Gives an empty slot its pages, which hold its first `num_rows` rows already."""
        self.cache.reserve(slot, pages, num_rows)

    def inject(self, slots: Sequence[int], num_rows: Sequence[int], taps: Tensor) -> None:
        """Appends context rows made from the taps [T, A*H] of T verified tokens.

        The first num_rows[0] of them go to slots[0], the next num_rows[1] to slots[1], ... Raises RequestError for a
        slot that would outgrow its plan.
        """
        bound = self.cache.k
        places = self.cache.extend(slots, num_rows)
        if self.cache.k is not bound:
            self.executor.bind(self.cache.k, self.cache.v)
        if places[0]:
            positions, pages, offsets = self._upload(*np.array(places, dtype=np.int32))
            self.cache.write(pages, offsets, self.executor.context(taps, positions))

    def draft(self, slots: Sequence[int], noise_embeds: Tensor) -> Tensor:
        """hidden [B, S, H] of blocks with embeddings noise_embeds [B, S, H], each right after its slot's context.

        In their dtype. Changes no context.
        """
        return self.executor.draft(self.inputs(slots, noise_embeds))

    def propose(self, slots: Sequence[int], noise_embeds: Tensor) -> Tensor:
        """Proposals [B, K] int64 of the same blocks, by the draft's own head. Changes no context."""
        return self.executor.propose(self.inputs(slots, noise_embeds))

    def candidates(
        self, slots: Sequence[int], noise_embeds: Tensor, anchors: Tensor, num_tokens: int, lm_head: Head
    ) -> Candidates:
        """The lattice of the first `num_tokens` slots behind `anchors` [B], of a draft whose candidates are scored.

        `lm_head` is the target's, for a draft without a head of its own. Changes no context.
        """
        assert self.scorer is not None, "nothing scores this draft's candidates"
        first = self.spec.first_proposing_row
        if self.spec.has_own_head:
            hidden, ids, logits = self.executor.candidates(self.inputs(slots, noise_embeds))
            ids, logits = ids[:, :num_tokens], logits[:, :num_tokens]
            hidden = hidden[:, first : first + num_tokens]
        else:
            hidden = self.draft(slots, noise_embeds)[:, first : first + num_tokens]
            ids, logits = self.scorer.from_logits(lm_head(hidden))
        return self.scorer.lattice(hidden, anchors, ids, logits)

    def inputs(self, slots: Sequence[int], noise_embeds: Tensor) -> DraftInputs:
        """Inputs of the executor for the slots' blocks."""
        lengths = [self.cache.lengths[slot] for slot in slots]
        page_ids = self.cache.page_ids(slots, max(lengths))
        blocks = [[*range(length, length + self.spec.block_size)] for length in lengths]
        arrays = (np.array(each, dtype=np.int32) for each in (blocks, page_ids, lengths))
        return DraftInputs(noise_embeds, *self._upload(*arrays))

    def release(self, slot: int) -> None:
        """Empties a slot's context."""
        self.cache.release(slot)

    def close(self) -> None:
        """Frees the context, the executor's graphs, and the draft's own tables; the last call."""
        self.executor.close()
        del self.executor, self.cache, self.embedding, self.scorer

    def _upload(self, *arrays: npt.NDArray[np.int32]) -> Iterator[Tensor]:
        """The arrays on the device, in one copy."""
        if self.executor.device.type == "cpu":
            return map(torch.from_numpy, arrays)
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        parts = torch.split(uploaded(flat, self.executor.device), [array.size for array in arrays])
        return (part.view(array.shape) for part, array in zip(parts, arrays, strict=True))
