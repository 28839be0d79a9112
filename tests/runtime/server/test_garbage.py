# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector is held back while a server runs, and for no longer."""

from __future__ import annotations

import gc
from weakref import ref

import pytest

from dflash_trt.runtime.request import Request
from dflash_trt.runtime.server.garbage import rare_collections
from tests.runtime.server.live import MODEL, Live
from tests.waiting import until


class Loop:
    """An object that refers to itself."""

    def __init__(self) -> None:
        self.itself = self


def num_requests() -> int:
    return sum(type(each) is Request for each in gc.get_objects())


def test_objects_of_steps_cause_no_full_collection() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        gc.collect()  # without it the first full one waits for a quarter of what is loaded
        full = gc.get_stats()[2]["collections"]
        for _ in range(50):
            step: list[list[int]] = [[] for _ in range(5_000)]
            del step
        assert gc.get_stats()[2]["collections"] == full
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_loaded_objects_are_collected_at_the_end_only() -> None:
    loaded = Loop()
    dropped = ref(loaded)
    with rare_collections():
        del loaded
        gc.collect()
        assert dropped() is not None
    gc.collect()
    assert dropped() is None


def test_loops_of_requests_are_collected() -> None:
    with rare_collections():
        dropped = ref(Loop())
        kept = [Loop() for _ in range(20_000)]
        assert dropped() is None
    del kept


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["def f(", "x"], "n": 2, "logprobs": 2},
        {"prompt": "def f(", "stream": True, "repetition_penalty": 1.1},
        {"messages": [{"role": "user", "content": "def f("}], "stream": True},
        {"input": "def f("},
    ],
    ids=["several", "penalty", "chat", "responses"],
)
def test_requests_that_have_ended_are_freed_without_a_collection(live: Live, body: dict[str, object]) -> None:
    path = "completions" if "prompt" in body else "chat/completions" if "messages" in body else "responses"
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    gc.collect()
    before = num_requests()
    gc.disable()
    try:
        assert live.post(f"/v1/{path}", **{"model": MODEL, limit: 4}, **body).status_code == 200
        live.await_idle()
        until(lambda: num_requests() <= before)  # other tests may keep some
    finally:
        gc.enable()
