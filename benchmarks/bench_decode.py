# SPDX-License-Identifier: Apache-2.0
"""Decoding on this machine's CPU: plain, DFlash, and transformers' own DFlash on the same pair.

All ways run in turn over the same held-out prompts, several rounds, in one process; a row's time is the
median round. Ratios compare each DFlash with the plain decoding of its own runtime. Prints tables, asserts
nothing.
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import click
import torch
from transformers.utils import logging

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.doctor import cpu_model  # noqa: E402
from dflash_trt.runtime.session import Session  # noqa: E402
from tests.engines import build  # noqa: E402
from tests.fixtures_data import PAIRS, prompts  # noqa: E402
from tests.oracle.transformers_dflash import dflash_greedy, load_assistant, plain_greedy  # noqa: E402
from tests.paths import FIXTURES  # noqa: E402

COLUMNS = ("decoding", "tokens", "steps", "tau", "tokens/s", "ratio to its plain")


@dataclass
class Way:
    """One way to decode: `run` gives the output and the number of target passes after the prefill."""

    name: str
    run: Callable[[list[int]], tuple[list[int], int]]
    plain: str | None = None
    """The way that its ratio refers to."""
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    steps: int = 0

    def round(self, token_prompts: list[list[int]]) -> None:
        begin = time.perf_counter()
        results = [self.run(prompt) for prompt in token_prompts]
        self.seconds.append(time.perf_counter() - begin)
        self.outputs = [output for output, _ in results]
        self.steps = sum(steps for _, steps in results)


@click.command()
@click.option("--prompts", "num_prompts", default=8, show_default=True)
@click.option("--tokens", default=128, show_default=True, help="New tokens a prompt.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--threads", default=1, show_default=True, help="Threads of torch; these models are tiny.")
def main(num_prompts: int, tokens: int, rounds: int, threads: int) -> None:
    """Measure tokens/s, steps and tau of every way to decode, on both fixture pairs."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "onnxruntime"))
    click.echo(f"{cpu_model()}, {threads} torch threads, Python {platform.python_version()}, {versions}")
    click.echo(f"{num_prompts} prompts x {tokens} tokens, median of {rounds} rounds\n")
    for name in PAIRS:
        with tempfile.TemporaryDirectory() as directory:
            _measure(name, Path(directory) / "engine", num_prompts, tokens, rounds)


def _measure(name: str, engine: Path, num_prompts: int, tokens: int, rounds: int) -> None:
    build(FIXTURES / f"{name}-dflash", engine, FIXTURES / name)
    session = Session.open(engine, str(FIXTURES / name), ignore_eos=True)
    model, assistant = session.target.model, load_assistant(FIXTURES / f"{name}-dflash")

    def ours(prompt: list[int]) -> tuple[list[int], int]:
        completion = session.generate(prompt, tokens)
        return completion.output_ids, completion.steps

    def ours_plain(prompt: list[int]) -> tuple[list[int], int]:
        completion = session.generate_plain(prompt, tokens)
        return completion.output_ids, completion.steps

    def oracle(prompt: list[int]) -> tuple[list[int], int]:
        run = dflash_greedy(model, assistant, prompt, tokens, eos_ids=())
        return run.output_ids, run.steps

    def oracle_plain(prompt: list[int]) -> tuple[list[int], int]:
        output = plain_greedy(model, prompt, tokens, eos_ids=())
        return output, len(output) - 1

    ways = [
        Way("dflash-trt plain", ours_plain),
        Way("dflash-trt DFlash", ours, plain="dflash-trt plain"),
        Way("transformers plain", oracle_plain),
        Way("transformers DFlash", oracle, plain="transformers plain"),
    ]
    token_prompts = prompts(session)[:num_prompts]
    for way in ways:
        way.round(token_prompts[:1])  # warm-up
        way.seconds.clear()
    for _ in range(rounds):
        for way in ways:
            way.round(token_prompts)
    _print(name, ways)


def _print(name: str, ways: list[Way]) -> None:
    median = {way.name: statistics.median(way.seconds) for way in ways}
    rows = []
    for way in ways:
        count = sum(map(len, way.outputs))
        tau = (count - len(way.outputs)) / way.steps
        ratio = f"{median[way.plain] / median[way.name]:.2f}x" if way.plain else ""
        speed = f"{count / median[way.name]:.0f}"
        rows.append((way.name, str(count), str(way.steps), f"{tau:.2f}", speed, ratio))
    identical = all(way.outputs == ways[0].outputs for way in ways)
    print_table(f"{name}: {'identical tokens' if identical else 'TOKENS DIFFER'}", COLUMNS, rows)


if __name__ == "__main__":
    main()
