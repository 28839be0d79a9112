# SPDX-License-Identifier: Apache-2.0
"""Pages that no request has reserved."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class FreePages:
    """Free pages of 0 .. num_pages - 1; gives the lowest first, so that the caches grow late."""

    def __init__(self, num_pages: int) -> None:
        self.num_free = num_pages
        self._returned: list[int] = []  # a heap; all from `_never_taken` on are free, too
        self._never_taken = 0

    def take(self, count: int) -> list[int]:
        """`count` <= `num_free` pages."""
        assert count <= self.num_free, "more pages than are free"
        self.num_free -= count
        pages = [heapq.heappop(self._returned) for _ in range(min(count, len(self._returned)))]
        begin, self._never_taken = self._never_taken, self._never_taken + count - len(pages)
        return [*pages, *range(begin, self._never_taken)]

    def give(self, pages: Iterable[int]) -> None:
        """Takes pages back."""
        for page in pages:
            heapq.heappush(self._returned, page)
            self.num_free += 1
