# SPDX-License-Identifier: Apache-2.0
"""Helpers of the Python API's tests; every wait is bounded."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from tests.paths import FIXTURES
from tests.waiting import PATIENCE, until

PROMPTS = ["def parse_args(argv):", "import os\n", "class Stack:\n    def push(self, x):", "# sort a list\n"]
LONG = SamplingParams(max_tokens=2000, ignore_eos=True)
"""About a second of work, so that it still runs when a test looks."""
T = TypeVar("T")


def greedy(max_tokens: int = 32, **settings: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **settings)  # type: ignore[arg-type]


def open_llm(engine: Path, **settings: object) -> LLM:
    return LLM(engine, FIXTURES / "tiny-qwen3", **{"max_batch_size": 4, **settings})  # type: ignore[arg-type]


def within(call: Callable[[], T], seconds: float = PATIENCE) -> T:
    """Result or exception of `call` on its own thread; fails if it takes longer."""
    outcome: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"no end after {seconds} seconds"
    if errors:
        raise errors[0]
    return outcome[0]


def await_idle(llm: LLM) -> None:
    """Waits until all slots and tokens are free."""
    until(lambda: not (llm.metrics().running or llm.metrics().waiting), llm.metrics)
    slots = llm.backend.decoder.slots
    assert (slots.free_slots, slots.free_tokens) == (slots.num_slots, slots.num_tokens)


def await_running(llm: LLM, number: int = 1, *, waiting: int = 0) -> None:
    """Waits until `number` requests run and `waiting` more are queued."""
    until(lambda: llm.metrics().running >= number and llm.metrics().waiting >= waiting, llm.metrics)
