# SPDX-License-Identifier: Apache-2.0
"""A step of both models: both caches contain the committed tokens and nothing else."""

from __future__ import annotations

import gc
import random
import weakref
from collections import defaultdict

import pytest
import torch

from dflash_trt.runtime import model_runner
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.target import Segment
from tests.decoding import greedy, open_trained

NUM_SLOTS = 4


@pytest.fixture(scope="module")
def session() -> Session:
    return open_trained("tiny-qwen3", max_batch_size=NUM_SLOTS)


def segment(slot: int, token_ids: list[int]) -> Segment:
    return Segment(slot=slot, token_ids=token_ids, num_logits=1)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 500) for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_the_context_is_that_of_the_committed_tokens(
    seed: int, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots come and go, rejected rows lie between kept ones, and prompts take several passes of the drafter."""
    monkeypatch.setattr(model_runner, "MAX_ROWS", 3 + 9 * seed)
    rng = random.Random(seed)
    runner, drafter = ModelRunner(session.target, session.drafter), session.drafter
    held: defaultdict[int, list[int]] = defaultdict(list)
    for _ in range(12):
        slots = sorted(rng.sample(range(NUM_SLOTS), rng.randint(1, NUM_SLOTS)))
        segments = [segment(slot, random_tokens(rng, rng.choice((1, 8, 30)))) for slot in slots]
        kept = [rng.randint(1, len(each.token_ids)) for each in segments]
        runner.verify(segments)
        runner.commit(kept)
        for each, count in zip(segments, kept, strict=True):
            held[each.slot] += each.token_ids[:count]
        if rng.random() < 0.3:
            runner.release(gone := rng.choice(slots))
            held[gone].clear()
        assert [drafter.cache.lengths[slot] for slot in range(NUM_SLOTS)] == [len(held[s]) for s in range(NUM_SLOTS)]
    contexts = {slot: [cache.clone() for cache in drafter.cache.rows(slot)] for slot in held}
    for slot in held:
        runner.release(slot)
    for slot, token_ids in held.items():
        if token_ids:
            runner.verify([segment(0, token_ids)])
            runner.commit([len(token_ids)])
            for found, expected in zip(contexts[slot], drafter.cache.rows(0), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
            runner.release(0)


def test_a_runner_between_steps_keeps_no_request(session: Session) -> None:
    def report(request: Request) -> None:
        """Stands for what a caller holds by it."""

    kept = weakref.ref(report)
    decoder = session.decoder()
    decoder.run([session.request([*range(5, 20)], greedy(4), report)])
    del report
    gc.collect()
    assert kept() is None
