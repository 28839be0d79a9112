# SPDX-License-Identifier: Apache-2.0
"""Decoding passes of a packed target, recorded once for each of their sizes on addresses that stay: CUDA graphs.

Launched one kernel after the other, a pass of few rows waits for Python: 1.25 ms a layer of a Qwen3-0.6B shape on an
H100 in BF16. A recorded pass is one launch. Passes of decoding and verification are recorded, because they need the
logits of every token and recur in the same sizes; prompts are not.

A recorded pass has a power of two of segments, of tokens in each, and of pages that each can see. Padding repeats the
last token of each segment and the last segment, and writes the same K and V to the same rows of the cache.

Legend: B segments, n tokens of each, M pages of each, R = B * n rows, C cached rows, N heads, G KV heads, D head_dim.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dflash_trt.device.launcher import Launcher
from dflash_trt.device.upload import pinned, uploaded
from dflash_trt.engine.signatures import TOKENS_PER_PAGE, num_pages_for
from dflash_trt.errors import first_line
from dflash_trt.runtime.kvcache.page_table import PageTable
from dflash_trt.runtime.kvcache.slot_cache import SlotCache
from dflash_trt.runtime.targets.packed_pass import (
    MAX_PAGES,
    AttentionRule,
    Pass,
    Reading,
    attend_rows,
    attention_mask,
    store_rows,
)
from dflash_trt.runtime.targets.target import Segment, Verified

LOG = logging.getLogger("dflash_trt.runtime.targets")
MAX_ROWS = 512
"""Rows of the largest pass that is recorded: 32 blocks of 16. Where that stops to pay was not measured on a GPU yet."""
MIN_PAGES = 4
MAX_RECORDINGS = 64
"""Sizes that stay recorded: a graph of a thousand kernels takes some megabytes of a GPU."""


class PassSize(NamedTuple):
    """Sizes of a recorded pass, each a power of two."""

    num_segments: int
    num_tokens: int
    """n, of each segment."""
    num_pages: int
    """M, of each segment."""

    @classmethod
    def of(cls, segments: Sequence[Segment], table: PageTable) -> PassSize:
        """The smallest size that holds the segments after their slots' contents."""
        num_tokens = max(len(segment.token_ids) for segment in segments)
        end = max(table.lengths[segment.slot] + len(segment.token_ids) for segment in segments)
        pages = max(MIN_PAGES, num_pages_for(end))
        return cls(_power_of_two(len(segments)), _power_of_two(num_tokens), _power_of_two(pages))

    @property
    def is_recorded(self) -> bool:
        """Whether a pass of this size is recorded; the time of a larger one is not its launches'."""
        return self.num_segments * self.num_tokens <= MAX_ROWS and self.num_segments * self.num_pages <= MAX_PAGES


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class StaticPass(Pass):
    """Pass of one size, whose tokens, positions and pages are tensors that the next pass overwrites."""

    def __init__(self, size: PassSize, cache: SlotCache, device: torch.device) -> None:
        self.size, self._cache = size, cache
        num_segments, num_tokens, num_pages = size
        num_rows = num_segments * num_tokens
        self._inputs = torch.zeros(3 * num_rows + num_segments * num_pages, dtype=torch.int64, device=device)
        self.token_ids, self.positions, self._rows = self._inputs[: 3 * num_rows].view(3, num_rows)
        self._page_ids = self._inputs[3 * num_rows :].view(num_segments, num_pages)
        self._readings: dict[tuple[int | None, int, torch.dtype], Reading] = {}

    def fill(self, segments: Sequence[Segment], table: PageTable) -> list[int]:
        """Takes the tokens, positions and pages of `segments`; returns the rows [sum of tokens] that are theirs."""
        num_segments, num_tokens, num_pages = self.size
        tokens = np.empty((3, num_segments, num_tokens), dtype=np.int64)
        pages = np.empty((num_segments, num_pages), dtype=np.int64)
        own: list[int] = []
        for i, segment in enumerate(segments):
            n, begin = len(segment.token_ids), table.lengths[segment.slot]
            tokens[:, i, :n] = segment.token_ids, range(begin, begin + n), table.rows(segment.slot, n)
            tokens[:, i, n:] = tokens[:, i, n - 1 : n]
            held = table.pages[segment.slot][: num_pages_for(begin + n)]
            pages[i] = held + held[:1] * (num_pages - len(held))  # masked, and never a NaN of another sequence
            own += range(i * num_tokens, i * num_tokens + n)
        last = len(segments) - 1
        tokens[:, last + 1 :] = tokens[:, last, -1:, None]
        pages[last + 1 :] = pages[last]
        inputs = torch.from_numpy(np.concatenate([tokens.reshape(-1), pages.reshape(-1)]))
        self._inputs.copy_(pinned(inputs, self._inputs.device), non_blocking=True)
        return own

    def begin(self) -> None:
        """Forgets what the layers of the last run shared."""
        self._readings.clear()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        k_cache, v_cache = store_rows(self._cache, layer, key, value, self._rows)
        kind = (rule.window, len(query) // len(k_cache), query.dtype)
        if kind not in self._readings:
            self._readings[kind] = self._reading(*kind)
        return attend_rows(query, k_cache, v_cache, self._readings[kind], rule, self.size.num_tokens)

    def _reading(self, window: int | None, heads_per_group: int, dtype: torch.dtype) -> Reading:
        """Pages and mask of a layer with this `window`: all pages, or as many as a segment's windows touch."""
        num_segments, num_tokens, num_pages = self.size
        positions = self.positions.view(num_segments, num_tokens)
        count, first = num_pages, torch.zeros_like(positions[:, 0])
        if window is not None:
            count = min(num_pages, (window + num_tokens - 2) // TOKENS_PER_PAGE + 2)
            first = (positions[:, 0] - window + 1).clamp(min=0) // TOKENS_PER_PAGE
        numbers = first[:, None] + torch.arange(count, device=first.device)  # [B, pages], of a segment's own
        page_ids = self._page_ids.gather(1, numbers.clamp(max=num_pages - 1))
        in_page = torch.arange(TOKENS_PER_PAGE, device=first.device)
        cached = (numbers[:, :, None] * TOKENS_PER_PAGE + in_page).flatten(1)  # [B, C], positions
        distance = positions[:, :, None] - cached[:, None]  # [B, n, C]
        visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return Reading(page_ids.flatten(), attention_mask(visible, heads_per_group, dtype))


Run = Callable[[StaticPass, bool], Verified]
"""The model's forward call over a pass, with taps or without; logits of every row."""


class _Outputs:
    """Logits and taps of the last run, where all recordings leave them: each graph would keep memory for its own."""

    def __init__(self) -> None:
        self._made: list[Tensor] = []

    def keep(self, made: Verified) -> None:
        """Copies them."""
        for number, values in enumerate([made.logits, *made.tapped]):
            rows = values.flatten(0, -2)
            if number == len(self._made):
                self._made.append(rows.new_empty(MAX_ROWS, rows.shape[1]))
            self._made[number][: len(rows)].copy_(rows)

    def rows(self, rows: Sequence[int], *, with_taps: bool) -> Verified:
        """Copies of these rows, which the next run does not overwrite; logits as FLOAT."""
        logits, *tapped = self._made
        index = uploaded(torch.tensor(rows), logits.device)
        taps = [tap.index_select(0, index) for tap in tapped] if with_taps else []
        return Verified(logits=logits.index_select(0, index).float(), tapped=taps)


class _Recording(NamedTuple):
    current: StaticPass
    replay: Callable[[], None]


class RecordedPasses:
    """Recordings by size, the last used at the end. The first pass of a size records it.

    When caches move, all are forgotten.
    """

    def __init__(self, run: Run, cache: SlotCache, launcher: Launcher, name: str) -> None:
        """`name` is the model's, for the log."""
        self._run, self._cache, self._launcher, self._name = run, cache, launcher, name
        self._recordings: dict[tuple[PassSize, bool], _Recording] = {}
        self._outputs = _Outputs()
        self._num_moves = cache.num_moves
        self.works = True
        """Whether passes are recorded: not after one that could not be."""
        """Whether no recording has failed."""

    @property
    def sizes(self) -> list[PassSize]:
        """Sizes of the recordings, the last used at the end; a size with taps and without counts twice."""
        return [size for size, _ in self._recordings]

    def close(self) -> None:
        """Frees all recordings, which hold the model."""
        vars(self).clear()

    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified | None:
        """Runs a pass whose tokens the cache's table has room for; None for one that is not recorded."""
        if not self.works or any(len(segment.token_ids) != segment.num_logits for segment in segments):
            return None
        size = PassSize.of(segments, self._cache.table)
        if not size.is_recorded:
            return None
        self._cache.make_room()
        if self._num_moves != self._cache.num_moves:
            self._recordings.clear()
            self._num_moves = self._cache.num_moves
        with self._launcher.queued():
            recording = self._recordings.pop((size, with_taps), None)
            current = StaticPass(size, self._cache, self._launcher.device) if recording is None else recording.current
            own = current.fill(segments, self._cache.table)
            recording = recording or self._record(current, with_taps)
            if recording is None:
                return None
            self._recordings[size, with_taps] = recording
            recording.replay()
            return self._outputs.rows(own, with_taps=with_taps)

    def _record(self, current: StaticPass, with_taps: bool) -> _Recording | None:
        """A recording of the pass; None, from now on, for a model that waits for the GPU in the middle of a pass."""

        def work() -> None:
            current.begin()
            with _no_waiting(self._launcher.device):  # in its first run: a failed recording stays in torch's allocator
                self._outputs.keep(self._run(current, with_taps))

        began = time.perf_counter()
        if len(self._recordings) == MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        try:
            current.begin()
            self._run(current, with_taps)  # first, what torch.compile makes: it may wait
            replay = self._launcher.record(work)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            LOG.warning(
                "%s: passes are launched kernel by kernel, for they cannot be recorded as a CUDA graph: %s",
                self._name,
                first_line(error),
            )
            self.works = False
            self._recordings.clear()
            return None
        current.begin()  # masks are the graph's own: later ones may have their memory
        LOG.info(
            "%s: recorded passes of %d x %d tokens on %d pages in %.2f s; sizes: %d%s",
            *(self._name, *current.size, time.perf_counter() - began, len(self._recordings) + 1),
            _free_memory(self._launcher.device),
        )
        return _Recording(current, replay)


def _free_memory(device: torch.device) -> str:
    return f"; {torch.cuda.mem_get_info(device)[0] / 1e9:.1f} GB of GPU memory free" if device.type == "cuda" else ""


@contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """RuntimeError from what waits for the GPU, which nothing in a CUDA graph may do."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # once, that not all that waits is found
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
