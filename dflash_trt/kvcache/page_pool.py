# SPDX-License-Identifier: Apache-2.0
"""Pages that nobody holds, given out in runs as long as can be had."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable


class PagePool:
    """Pages 0 .. num_pages - 1; those that lie one behind the other are read in place, so they are given together."""

    def __init__(self, num_pages: int) -> None:
        self.num_free = num_pages
        self._runs = [(0, num_pages)] if num_pages else []
        """Free pages, begin and end of each run, in order; no run touches the next."""

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` <= `num_free` pages: behind `after`, else the lowest run that is long enough, else the lowest."""
        assert count <= self.num_free, "more pages than are free"
        self.num_free -= count
        fitting = [run for run in self._runs if run[1] - run[0] >= count]
        behind = [run for run in fitting if after is not None and run[0] == after + 1]
        pages: list[int] = []
        for begin, end in (behind or fitting or list(self._runs))[: 1 if fitting else None]:
            taken = range(begin, min(end, begin + count - len(pages)))
            if taken:
                pages += taken
                self._cut(begin, end, taken.stop)
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Takes pages back."""
        for page in pages:
            self._join(page)
            self.num_free += 1

    def _cut(self, begin: int, end: int, rest: int) -> None:
        self._runs.remove((begin, end))
        if rest < end:
            insort(self._runs, (rest, end))

    def _join(self, page: int) -> None:
        at = bisect_left(self._runs, (page, page))
        begin, end = page, page + 1
        if at < len(self._runs) and self._runs[at][0] == end:
            end = self._runs.pop(at)[1]
        if at and self._runs[at - 1][1] == begin:
            begin = self._runs.pop(at - 1)[0]
        insort(self._runs, (begin, end))
