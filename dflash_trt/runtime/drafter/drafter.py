# SPDX-License-Identifier: Apache-2.0
"""The running draft: its context, its blocks, and the proposals of one pass over those of all slots."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from dflash_trt.checkpoint.draft_spec import EMBEDDING, MASK_EMBEDDING, DraftSpec
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.device.upload import uploaded
from dflash_trt.engine.candidate_scorer import CandidateScorer, DraftedBlock, Embed
from dflash_trt.engine.executor import DraftInputs, Executor
from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.engine.signatures import CONTEXT_HIDDEN
from dflash_trt.runtime.kvcache.context_cache import ContextCache

LOG = logging.getLogger("dflash_trt.runtime")


class Vocabulary(Protocol):
    """The target's embedding and lm_head, which a draft without its own borrows."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings [..., H] of token ids [...] int64."""

    def logits(self, hidden: Tensor) -> Tensor:
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
        self.embedding = embedding or DraftEmbedding(spec)
        self.scorer = scorer
        self.cache_bytes_per_token = cache.bytes_per_token
        """Bytes of one context row of one slot."""
        self.max_rows = min(spec.max_position_embeddings, cache.max_rows or spec.max_position_embeddings)
        """Context rows of one slot; beyond them the target goes on without drafts."""
        self._has_said_full = False
        self._target: Vocabulary | None = None
        self._context_hidden: Tensor | None = None
        """[slots, H] FLOAT: the last context row of each slot before K and V, of a LiLiCorr draft."""
        if spec.lilicorr is not None:
            self._context_hidden = torch.zeros(len(cache.lengths), spec.hidden_size, device=executor.device)

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

    def borrow(self, target: Vocabulary) -> None:
        """Proposes with the embedding and lm_head of `target` from now on, where the draft has none of its own."""
        self._target = target

    def allocate(self, num_pages: int) -> None:
        """Allocates `num_pages` pages on a GPU. A CPU's memory, and a GPU's beyond that, is taken on first write."""
        if self.executor.device.type != "cpu":
            self.cache.make_room(num_pages)
            self.executor.bind(self.cache.k, self.cache.v)

    def reserve(self, slot: int, pages: Sequence[int], num_rows: int) -> None:
        """Gives an empty slot its pages, which hold its first `num_rows` rows already."""
        self.cache.reserve(slot, pages, min(num_rows, self.max_rows))

    def fitting(self, slots: Sequence[int], num_rows: Sequence[int]) -> list[int]:
        """How many of the new rows of each slot its context can still take before the draft has no more positions."""
        lengths, end = self.cache.lengths, self.max_rows
        return [
            count if lengths[slot] + count <= end else max(0, end - lengths[slot])
            for slot, count in zip(slots, num_rows, strict=True)
        ]

    @property
    def is_asynchronous(self) -> bool:
        """Whether `start` returns before its pass has ended."""
        return self.executor.device.type != "cpu"

    def draftable(self, slots: Sequence[int]) -> list[int]:
        """Slots whose next token has a position in the draft; the log says once that one has none."""
        lengths = self.cache.lengths
        able = [slot for slot in slots if lengths[slot] < self.max_rows]
        if len(able) < len(slots) and not self._has_said_full:
            self._has_said_full = True
            bound = "max_position_embeddings" if self.max_rows == self.spec.max_position_embeddings else "--max-seq-len"
            LOG.warning(
                "the draft has positions for %d tokens (%s): longer requests go on without drafts", self.max_rows, bound
            )
        return able

    @torch.inference_mode()
    def inject(
        self, slots: Sequence[int], num_rows: Sequence[int], taps: Tensor, rows: npt.NDArray[np.int64] | None = None
    ) -> None:
        """Appends context rows made from `rows` of taps [R, A*H], places in ascending order; all R unless given.

        The first num_rows[0] of them go to slots[0], the next num_rows[1] to slots[1], ... Raises RequestError for a
        slot that would outgrow its plan.
        """
        bound = self.cache.k
        places = self.cache.extend(slots, num_rows)
        if self.cache.k is not bound:
            self.executor.bind(self.cache.k, self.cache.v)
        if places[0]:
            rows = np.arange(len(taps)) if rows is None else rows
            positions, pages, offsets, chosen = self._upload(*np.array([*places, rows], dtype=np.int32))
            begin, end = rows[0], rows[-1] + 1
            taps = taps[begin:end] if end - begin == len(rows) else taps.index_select(0, chosen)
            outputs = self.executor.context(taps, positions)
            self.cache.write(pages, offsets, outputs["kv"])
            if self._context_hidden is not None:
                self._keep_last(slots, num_rows, outputs[CONTEXT_HIDDEN])

    def _keep_last(self, slots: Sequence[int], num_rows: Sequence[int], rows: Tensor) -> None:
        """Keeps the last of each slot's new rows [T, H], which LiLiCorr starts its paths from."""
        assert self._context_hidden is not None
        last = np.cumsum(num_rows) - 1
        pairs = [(slot, row) for slot, row, count in zip(slots, last, num_rows, strict=True) if count]
        kept, taken = self._upload(*np.array(pairs, dtype=np.int32).T)
        self._context_hidden[kept.long()] = rows[taken.long()].to(self._context_hidden)

    def propose(
        self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int, draws: Sequence[Draw | None] = ()
    ) -> list[Proposals]:
        """The proposals of a pass, once they are there."""
        return self.start(slots, anchors, num_tokens, draws)()

    @torch.inference_mode()
    def start(
        self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int, draws: Sequence[Draw | None] = ()
    ) -> Callable[[], list[Proposals]]:
        """Starts one pass over the blocks [anchor, mask, mask, ...]; returns what waits for the proposals.

        There are `num_tokens` for each slot, 1 to K; they must be read before the next pass starts. `anchors` are the
        last verified tokens. Proposals are greedy, except where `draws` has a Draw for a slot and the draft scores
        candidates. Changes no context.
        """
        assert self._target is not None, "borrow comes first"
        first, anchor_ids = self.spec.first_proposing_row, torch.from_numpy(np.array(anchors))
        noise_embeds = self.embedding.blocks(anchor_ids, self._target.embed)
        outputs = self.run(slots, noise_embeds)
        hidden = outputs["hidden"][:, first : first + num_tokens].to(noise_embeds.dtype)
        if self.scorer is None and self.spec.has_own_head:
            return partial(_greedy, outputs["token_ids"][:, :num_tokens])
        if self.scorer is None:
            return partial(_greedy, argmax(self._target.logits(hidden)))
        if self.spec.has_own_head:
            ids, logits = (outputs[name][:, :num_tokens] for name in ("candidate_ids", "candidate_logits"))
        else:
            ids, logits = self.scorer.from_logits(self._target.logits(hidden))
        block = DraftedBlock(hidden, anchor_ids, self._last_rows(slots), self._target.embed)
        return partial(self.scorer.lattice(block, ids.long(), logits).walk, draws)

    def _last_rows(self, slots: Sequence[int]) -> Tensor | None:
        """The last context rows [B, H] of the slots; None of a draft that does not read them."""
        if self._context_hidden is None:
            return None
        (kept,) = self._upload(np.array(slots, dtype=np.int32))
        return self._context_hidden[kept.long()]

    def run(self, slots: Sequence[int], noise_embeds: Tensor) -> Mapping[str, Tensor]:
        """The draft graph's outputs for blocks of embeddings [B, S, H], each right after its slot's context."""
        lengths = [self.cache.lengths[slot] for slot in slots]
        page_ids = self.cache.page_ids(slots, max(lengths))
        blocks = [[*range(length, length + self.spec.block_size)] for length in lengths]
        arrays = (np.array(each, dtype=np.int32) for each in (blocks, page_ids, lengths))
        return self.executor.draft(DraftInputs(noise_embeds, *self._upload(*arrays)))

    def release(self, slot: int) -> None:
        """Empties a slot's context."""
        self.cache.release(slot)

    def close(self) -> None:
        """Frees the context, the executor's graphs, and the draft's own tables; the last call."""
        self.executor.close()
        del self.executor, self.cache, self.embedding, self.scorer, self._target

    def _upload(self, *arrays: npt.NDArray[np.int32]) -> Iterator[Tensor]:
        """The arrays on the device, in one copy."""
        if self.executor.device.type == "cpu":
            return map(torch.from_numpy, arrays)
        flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        parts = torch.split(uploaded(flat, self.executor.device), [array.size for array in arrays])
        return (part.view(array.shape) for part, array in zip(parts, arrays, strict=True))


def argmax(logits: Tensor) -> Any:
    """Argmax [B, K] of logits [B, K, V], an array or a tensor.

    NumPy takes a third to a fifth of torch's time (2.13), and has no BF16.
    """
    return (logits.float().numpy() if logits.device.type == "cpu" else logits).argmax(-1)


def _greedy(token_ids: Any) -> list[Proposals]:
    return [Proposals(row) for row in token_ids.tolist()]


class DraftEmbedding:
    """The tables that an engine holds: a whole embedding, the row of the mask token, both, or neither."""

    def __init__(self, spec: DraftSpec, table: Tensor | None = None, mask_row: Tensor | None = None) -> None:
        """`table` is [V, H], `mask_row` [H], any floats."""
        self._mask_token_id, self._block_size = spec.mask_token_id, spec.block_size
        self._table = table
        self._mask_row = mask_row
        self._blocks: Tensor | None = None

    @classmethod
    def read(cls, engine: Path, spec: DraftSpec, device: torch.device) -> DraftEmbedding:
        """The embedding of the directory `engine`, in its stored dtype; on a CPU it stays in the file."""
        with safe_open(engine / SINGLE, framework="pt", device=str(device)) as tensors:
            table = tensors.get_tensor(EMBEDDING) if spec.own_embedding else None
            mask_row = tensors.get_tensor(MASK_EMBEDDING) if spec.mask_embedding else None
        return cls(spec, table, mask_row)

    def blocks(self, anchors: Tensor, borrowed: Embed) -> Tensor:
        """Embeddings [B, S, H] of the blocks [anchor, mask, mask, ...] of token ids `anchors` [B] int64.

        The next call overwrites them. Mask rows are computed once, by the first `borrowed`.
        """
        if self._blocks is None or len(self._blocks) < len(anchors):
            masks = self.rows(torch.full((len(anchors), self._block_size), self._mask_token_id), borrowed)
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
