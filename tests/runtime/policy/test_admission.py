# SPDX-License-Identifier: Apache-2.0
"""Waiting requests come in the order of their arrival, and may leave at any time."""

from __future__ import annotations

from dflash_trt.runtime.policy.admission import FirstComeFirstServed


def test_first_come_first_served() -> None:
    waiting = FirstComeFirstServed[str]()
    assert waiting.next() is None
    for request in ("a", "b", "c", "d"):
        waiting.add(request)
    assert (waiting.next(), len(waiting), [*waiting]) == ("a", 4, ["a", "b", "c", "d"])
    waiting.remove("b")
    waiting.remove("a")
    assert waiting.next() == "c"
    assert "b" not in waiting
    waiting.clear()
    assert (waiting.next(), len(waiting)) == (None, 0)
