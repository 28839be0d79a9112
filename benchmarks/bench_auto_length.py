# SPDX-License-Identifier: Apache-2.0
"""Compares auto's draft length with the better of plain decoding and whole blocks, as a ratio of tokens per second.

They take turns of 40 ms, so that a slow moment of the machine meets all of them, in an order that is drawn anew for
each turn; seconds are the process's CPU time, auto's own, too. Requests follow each other so that the batch stays full,
each with half to one and a half times --tokens, since plain decoding's requests would always begin and end together if
all had the same number. With --together, this number of requests begins at once, with --tokens each; the next ones
begin when all have ended. A model's memory address changes the time by some percent, so each way uses each of three
models for a third of the time. Turns before --skip, and before 64 steps of auto, are left out. Deviations are by
bootstrap over turns. The MoE pair has random weights, and its acceptance is forced (forced_acceptance.py). Prints a
table for each pair, asserts nothing; takes --seconds for each batch and pair.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import msgspec
import numpy as np
import torch
from transformers.utils import logging

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.forced_acceptance import MOE_DRAFT, ForcedRunner, random_prompts, write_moe_pair  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.runtime.policy.auto_length import AutoLength  # noqa: E402
from dflash_trt.runtime.policy.draft_length import DraftLength, FixedLength  # noqa: E402
from dflash_trt.runtime.policy.step_record import StepRecord  # noqa: E402
from dflash_trt.runtime.session import Session, run  # noqa: E402
from tests.decoding import greedy, open_without_tokenizer  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.fixtures_data import PAIRS, prompts  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402

MOE = "qwen3-moe-shape"
TURN, LEARNING_STEPS, RESAMPLES = 0.04, 64, 500
COLUMNS = ("pair", "batch", "prompts", "plain", "whole blocks", "auto, tokens/s", "of the better", "at the end it took")
Answers = dict[tuple[int, ...], list[int]]


@dataclass(kw_only=True)
class Way:
    """One way to decode, and what its turns brought."""

    session: Session
    length: DraftLength
    answers: Answers
    """Answers of plain decoding, where acceptance is forced."""
    batch: int
    together: int | None
    prompts: Iterator[list[int]]
    limits: Iterator[int]
    """Limits on new tokens, one for each request."""
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.use(self.session)

    def use(self, session: Session) -> None:
        """Begins anew, with what is known of draft lengths."""
        self.session = session
        is_plain = isinstance(self.length, FixedLength) and self.length.length == 0
        if self.answers and not is_plain:
            self.decoder = ForcedRunner(self.session, self.answers, self.length, self.batch).decoder
        else:
            self.decoder = self.session.decoder(self.length, max_batch_size=self.batch)

    def stop(self) -> None:
        """Leaves the session to others."""
        for request in [*self.decoder.running.values(), *self.decoder.waiting]:
            self.decoder.cancel(request)

    def turn(self) -> None:
        """Steps for 40 ms."""
        begin, before = time.process_time(), self.decoder.metrics().output_tokens
        while (seconds := time.process_time() - begin) < TURN:
            self._add_requests()
            self.decoder.step()
        self.tokens.append(self.decoder.metrics().output_tokens - before)
        self.seconds.append(seconds)

    def _add_requests(self) -> None:
        """Adds a request for each that ended; where requests are awaited together, once all have."""
        if self.together is None:
            number = self.batch - len(self.decoder.running) - len(self.decoder.waiting)
        else:
            number = self.together if self.decoder.is_idle else 0
        for _ in range(number):
            request = self.session.request(next(self.prompts), greedy(next(self.limits)))
            self.decoder.add(request)

    def speed(self, turns: Sequence[int] | slice = slice(None)) -> float:
        """Tokens a second of some turns."""
        return float(np.array(self.tokens)[turns].sum() / np.array(self.seconds)[turns].sum())


@click.command()
@click.option("--pair", "pairs", multiple=True, type=click.Choice([*PAIRS, MOE]), default=(*PAIRS, MOE))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 4, 8, 16, 32), show_default=True)
@click.option("--together", type=int, default=None, help="So many prompts begin at once, and all are awaited.")
@click.option("--tokens", default=128, show_default=True, help="New tokens a prompt, on average.")
@click.option("--seconds", default=60, show_default=True, help="For each batch and pair, of CPU time.")
@click.option("--skip", default=2, show_default=True, help="Turns of each that do not count.")
def main(
    pairs: tuple[str, ...], batches: tuple[int, ...], together: int | None, tokens: int, seconds: int, skip: int
) -> None:
    """Measure tokens/s of plain decoding, whole blocks and auto."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for name in pairs:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            sessions, texts = _open(name, Path(folder), max(batches))
            answers = _answers(sessions[0], texts, 3 * tokens // 2) if name == MOE else {}
            for batch in batches:
                ways = _measure(sessions, texts, answers, batch, together, tokens, seconds, skip)
                rows.append((name, str(batch), str(together or ""), *_row(ways)))
        load = "all begin at once" if together else "the batch is kept full"
        print_table(f"{cpu_model()}, one thread; {load}, {tokens} tokens a prompt", COLUMNS, rows)


def _open(name: str, folder: Path, num_slots: int) -> tuple[list[Session], list[list[int]]]:
    if name == MOE:
        target, draft = write_moe_pair(folder)
        texts = random_prompts(2 * num_slots, MOE_DRAFT)
    else:
        target, draft = FIXTURES / name, FIXTURES / f"{name}-dflash"
        texts = prompts(target)
    build(draft, engine := folder / "engine", target)
    return [open_without_tokenizer(engine, target, num_slots=num_slots) for _ in range(3)], texts


def _limits(tokens: int) -> Iterator[int]:
    """Limits that are the same for each way to decode."""
    rng = random.Random(0)
    while True:
        yield rng.randint(tokens // 2, 3 * tokens // 2)


def _answers(session: Session, texts: Sequence[list[int]], tokens: int) -> Answers:
    done = run(session.plain_decoder(), [session.request(text, greedy(tokens)) for text in texts])
    return {tuple(text): answer.token_ids for text, answer in zip(texts, done, strict=True)}


class CpuTimed(AutoLength):
    """Learns from CPU time, which other programs of a shared machine disturb less."""

    _began = 0.0

    def choose(self, batch_size: int) -> int:
        """Length of a step that begins now."""
        self._began = time.process_time()
        return super().choose(batch_size)

    def observe(self, step: StepRecord) -> None:
        """Learns from a step that ends now."""
        super().observe(msgspec.structs.replace(step, seconds=time.process_time() - self._began))


def _measure(
    sessions: Sequence[Session],
    texts: Sequence[list[int]],
    answers: Answers,
    batch: int,
    together: int | None,
    tokens: int,
    seconds: int,
    skip: int,
) -> list[Way]:
    """Plain decoding, whole blocks and auto."""
    block = sessions[0].manifest.draft.num_draft_tokens
    lengths = (FixedLength(0), FixedLength(block), CpuTimed(block))
    ways = [
        Way(
            session=session,
            length=length,
            answers=answers,
            batch=batch,
            together=together,
            prompts=itertools.cycle(texts),
            limits=itertools.repeat(tokens) if together else _limits(tokens),
        )
        for session, length in zip(sessions, lengths, strict=True)
    ]
    for i in range(len(ways)):
        for way, session in zip(ways, [*sessions[i:], *sessions[:i]], strict=True):
            way.use(session)
        _take_turns(ways, time.process_time() + seconds / len(ways), skip)
    return ways


def _take_turns(ways: Sequence[Way], end: float, skip: int) -> None:
    """Runs the ways in turn and notes the steps that count."""
    begin = len(ways[0].tokens)
    first = begin + skip
    rng = random.Random(0)
    while time.process_time() < end:
        for way in rng.sample(ways, len(ways)):
            way.turn()
        if ways[-1].decoder.metrics().passes < LEARNING_STEPS:
            first = max(first, len(ways[-1].tokens))
    for way in ways:
        way.stop()
        del way.tokens[begin:first], way.seconds[begin:first]


def _row(ways: Sequence[Way]) -> tuple[str, ...]:
    plain, whole, auto = ways
    generator = np.random.default_rng(0)
    number = len(auto.tokens)
    if number == 0:
        return "", "", "", "longer --seconds", ""
    drawn = [_ratio(ways, generator.integers(0, number, number).tolist()) for _ in range(RESAMPLES)]
    ratio = f"{_ratio(ways):.3f} ± {np.std(drawn):.3f}"
    chosen = auto.length.explain().partition(":")[0]
    return f"{plain.speed():.0f}", f"{whole.speed():.0f}", f"{auto.speed():.0f}", ratio, chosen


def _ratio(ways: Sequence[Way], turns: Sequence[int] | slice = slice(None)) -> float:
    plain, whole, auto = (way.speed(turns) for way in ways)
    return auto / max(plain, whole)


if __name__ == "__main__":
    main()
