# SPDX-License-Identifier: Apache-2.0
"""Pages of the caches that running requests share with those that begin alike, and with those to come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.request import Request

if TYPE_CHECKING:
    from dflash_trt.runtime.pair import Pair


class PrefixSharing:
    """Of one decoder, whose `running` requests are by slot."""

    def __init__(self, pair: Pair, slots: SlotPool, running: Mapping[int, Request]) -> None:
        self._pair, self._slots, self._running = pair, slots, running

    def share(self, prompt_ids: Sequence[int]) -> None:
        """Shares the pages at the beginning of a prompt that running requests have computed, page by page."""
        while ahead := self._computing_next_page(prompt_ids):
            end = self._next_page_end(prompt_ids)
            computed = [slot for slot in ahead if self._running[slot].num_computed >= end]
            for slot in computed:
                self.leave(slot)
            if not computed or self._slots.num_cached(prompt_ids) < end:  # or somebody else has used the caches
                return

    def awaits(self, prompt_ids: Sequence[int]) -> bool:
        """Whether running requests are computing the next page that a prompt could begin with: soon it is shared.

        Prompts are read oldest first, so it would seldom have been read before that.
        """
        ahead, end = self._computing_next_page(prompt_ids), self._next_page_end(prompt_ids)
        return bool(ahead) and all(self._running[slot].num_computed < end for slot in ahead)

    def _computing_next_page(self, prompt_ids: Sequence[int]) -> list[int]:
        """Slots of running requests whose prompts begin as this one does, up to its first page that nobody shares."""
        end = self._next_page_end(prompt_ids)
        if not self._slots.prefix_caching or end >= len(prompt_ids):
            return []
        return [slot for slot, request in self._running.items() if request.prompt_ids[:end] == prompt_ids[:end]]

    def _next_page_end(self, prompt_ids: Sequence[int]) -> int:
        return self._slots.num_cached(prompt_ids) + TOKENS_PER_PAGE

    def publish(self) -> None:
        """Shares what the last step has completed."""
        for slot in self._running:
            self._publish(slot)

    def _publish(self, slot: int) -> None:
        """Shares the slot's full pages of tokens that target and drafter both have."""
        if unpublished := self._slots.unpublished(slot, self._pair.num_written(slot)):
            self._slots.publish(slot, self._running[slot].tokens(unpublished))

    def leave(self, slot: int) -> None:
        """Shares what a request leaves behind; the drafter catches up where that makes a page full."""
        if self._slots.unpublished(slot, self._running[slot].num_computed):
            self._pair.catch_up()
            self._publish(slot)
