# SPDX-License-Identifier: Apache-2.0
"""Decoding on this machine's CPU: plain, DFlash and DFlash with auto at several batch sizes, and transformers' DFlash.

All ways run in turn over the same held-out prompts, several rounds, in one process; a row's time is the median round.
Ratios compare each DFlash with the plain decoding of its own runtime at the same batch size. "host" is what a step
spends outside the forward calls of target and drafter, embeddings and lm_head included in those. Prints tables,
asserts nothing.
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from onnxruntime import InferenceSession
from transformers.utils import logging

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.doctor import cpu_model  # noqa: E402
from dflash_trt.runtime.decoder import Decoder  # noqa: E402
from dflash_trt.runtime.draft_length import DraftLength, parse_draft_length  # noqa: E402
from dflash_trt.runtime.session import Session, run  # noqa: E402
from tests.decoding import greedy  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.fixtures_data import PAIRS, prompts  # noqa: E402
from tests.oracle.transformers_dflash import dflash_greedy, load_assistant, load_target, plain_greedy  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402

COLUMNS = ("decoding", "batch", "tokens", "steps", "tau", "tokens/s", "ratio to its plain", "host, ms a step")


@dataclass
class Way:
    """One way to decode all prompts: `run` gives the outputs and the number of verify passes of all requests."""

    name: str
    batch: int
    run: Callable[[], tuple[list[list[int]], int]]
    plain: Way | None = None
    """The way that its ratio refers to."""
    host_milliseconds: float | None = None
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    steps: int = 0

    def round(self) -> None:
        begin = time.perf_counter()
        self.outputs, self.steps = self.run()
        self.seconds.append(time.perf_counter() - begin)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


class Forwards:
    """Seconds spent in forward calls while it watches."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watch(self, session: Session) -> Iterator[None]:
        """Times the calls into models and ONNX Runtime."""
        calls: list[tuple[object, str]] = [(session.target, name) for name in ("_forward", "logits", "embed")]
        calls.append((InferenceSession, "run_with_iobinding"))
        with ExitStack() as stack:
            for owner, name in calls:
                stack.enter_context(patch.object(owner, name, self._timed(getattr(owner, name))))
            yield

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


@click.command()
@click.option("--prompts", "num_prompts", default=16, show_default=True)
@click.option("--tokens", default=128, show_default=True, help="New tokens a prompt.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 4, 16, 32), show_default=True)
@click.option("--draft-length", default=None, help="As for `dflash-trt generate`; the whole block by default.")
@click.option("--threads", default=1, show_default=True, help="Threads of torch; these models are tiny.")
def main(
    num_prompts: int, tokens: int, rounds: int, batches: tuple[int, ...], draft_length: str | None, threads: int
) -> None:
    """Measure tokens/s, steps and tau of every way to decode, on both fixture pairs."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "onnxruntime"))
    click.echo(f"{cpu_model()}, {threads} torch threads, Python {platform.python_version()}, {versions}")
    click.echo(f"{num_prompts} prompts x {tokens} tokens, median of {rounds} rounds\n")
    for name in PAIRS:
        with tempfile.TemporaryDirectory() as directory:
            engine = Path(directory) / "engine"
            build(FIXTURES / f"{name}-dflash", engine, FIXTURES / name)
            ways = [*_ours(name, engine, num_prompts, tokens, batches, draft_length), *_peer(name, num_prompts, tokens)]
            _measure(ways, rounds)
            _print(name, ways)


def _ours(
    name: str, engine: Path, num_prompts: int, tokens: int, batches: tuple[int, ...], draft_length: str | None
) -> Iterator[Way]:
    for batch in batches:
        session = Session.open(engine, str(FIXTURES / name), num_slots=batch)
        token_prompts = prompts(session)[:num_prompts]
        block = session.manifest.draft.num_draft_tokens

        def decode(
            decoder: Callable[[], Decoder], session: Session = session, token_prompts: list[list[int]] = token_prompts
        ) -> tuple[list[list[int]], int]:
            answers = run(decoder(), [session.request(prompt, greedy(tokens)) for prompt in token_prompts])
            return [answer.token_ids for answer in answers], sum(answer.steps for answer in answers)

        def speculative(session: Session = session, block: int = block) -> Decoder:
            return session.decoder(parse_draft_length(draft_length or str(block), block))

        plain = Way("dflash-trt plain", batch, lambda decode=decode, session=session: decode(session.plain_decoder))
        ours = Way("dflash-trt DFlash", batch, lambda decode=decode, s=speculative: decode(s), plain=plain)
        ours.host_milliseconds = _host(session, speculative, token_prompts[:batch], tokens)
        chooser = parse_draft_length("auto", block)  # as in a server, it keeps what it has measured

        def automatic(session: Session = session, chooser: DraftLength = chooser) -> Decoder:
            return session.decoder(chooser)

        yield plain
        yield ours
        yield Way("dflash-trt auto", batch, lambda decode=decode, s=automatic: decode(s), plain=plain)


def _host(session: Session, speculative: Callable[[], Decoder], token_prompts: list[list[int]], tokens: int) -> float:
    """Milliseconds a pass that are not spent in forward calls, over one full batch."""
    decoder, forwards = speculative(), Forwards()
    requests = [session.request(prompt, greedy(tokens)) for prompt in token_prompts]
    session.warm_up(token_prompts[0])
    with forwards.watch(session):
        begin = time.perf_counter()
        run(decoder, requests)
        seconds = time.perf_counter() - begin
    return (seconds - forwards.seconds) / decoder.metrics().passes * 1e3


def _peer(name: str, num_prompts: int, tokens: int) -> Iterator[Way]:
    model, assistant = load_target(FIXTURES / name), load_assistant(FIXTURES / f"{name}-dflash")
    token_prompts = prompts(FIXTURES / name)[:num_prompts]

    def speculative() -> tuple[list[list[int]], int]:
        runs = [dflash_greedy(model, assistant, prompt, tokens, eos_ids=()) for prompt in token_prompts]
        return [run.output_ids for run in runs], sum(run.steps for run in runs)

    def plain() -> tuple[list[list[int]], int]:
        outputs = [plain_greedy(model, prompt, tokens, eos_ids=()) for prompt in token_prompts]
        return outputs, sum(len(output) - 1 for output in outputs)

    baseline = Way("transformers plain", 1, plain)
    yield baseline
    yield Way("transformers DFlash", 1, speculative, plain=baseline)


def _measure(ways: list[Way], rounds: int) -> None:
    for way in ways:
        way.round()  # warm-up
        way.seconds.clear()
    for _ in range(rounds):
        for way in ways:
            way.round()


def _print(name: str, ways: list[Way]) -> None:
    rows = []
    for way in ways:
        count = sum(map(len, way.outputs))
        tau = (count - len(way.outputs)) / way.steps
        ratio = f"{way.plain.median / way.median:.2f}x" if way.plain else ""
        host = "" if way.host_milliseconds is None else f"{way.host_milliseconds:.2f}"
        speed = f"{count / way.median:.0f}"
        rows.append((way.name, str(way.batch), str(count), str(way.steps), f"{tau:.2f}", speed, ratio, host))
    identical = all(way.outputs == ways[0].outputs for way in ways)
    print_table(f"{name}: {'identical tokens' if identical else 'TOKENS DIFFER'}", COLUMNS, rows)


if __name__ == "__main__":
    main()
