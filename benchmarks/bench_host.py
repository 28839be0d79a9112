# SPDX-License-Identifier: Apache-2.0
"""Measures the host's part of a step: all that Python does beside the passes of target and drafter.

Both models are stand-ins whose own time does not count (host_steps.py). With `--against`, another revision of the
package does the same work in a process of its own, which takes turns with this one's; its compiled module is built
without CUDA. A cell is CPU time in microseconds of a step: the minimum and the median of all. A row whose caches
are emptied writes 64 MB before each step, as a pass of a model does. The last table compares long prompts and answers
with short ones, in processes that take turns, too. Prints tables, asserts nothing.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import click

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.host_steps import OTHER_PACKAGE, Case  # noqa: E402
from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402

SIZES = (1, 16, 64, 256)
FEATURES = ("plain", "text", "stop", "grammar", "prefixes", "logprobs", "penalty")
LENGTHS = (32768, 256)
STEPS = 2048
"""Steps of one request in a turn; more requests have fewer, but at least eight."""
EMPTIED_STEPS = 256
"""Most steps of a turn with emptied caches: emptying them takes far longer than a step."""


def steps_of_batches() -> dict[str, Case]:
    """Greedy and drawn tokens, few and many accepted, and emptied caches."""
    return {
        f"{'sampled' if sampled else 'greedy'}, tau {tau}, {size} requests{', emptied caches' * emptied}": Case(
            requests=size, tau=tau, sampled=sampled, emptied=emptied
        )
        for emptied in (False, True)
        for size in SIZES
        for sampled in (False, True)
        for tau in (1, 4)
    }


def steps_with_features(size: int) -> dict[str, Case]:
    """Steps of requests with one more property each."""
    return {
        f"{feature}, {size} requests": Case(requests=size, tau=1 if feature == "plain" else 4)._replace(
            **{feature: True}
        )
        for feature in FEATURES
    }


def steps_of_lengths(size: int) -> dict[str, list[Case]]:
    """Long and short prompts, and long and short answers."""
    kinds = {
        "greedy": Case(requests=size, tau=4),
        "sampled": Case(requests=size, tau=4, sampled=True),
        "text and prefixes": Case(requests=size, tau=4, text=True, prefixes=True),
        "penalty": Case(requests=size, tau=4, penalty=True),
    }
    prompts = {f"{name}, prompt": [case._replace(prompt=length) for length in LENGTHS] for name, case in kinds.items()}
    answers = {f"{name}, answer": [case._replace(answer=length) for length in LENGTHS] for name, case in kinds.items()}
    return {f"{name}, {size} requests": cases for name, cases in (prompts | answers).items()}


class Worker:
    """A process that steps one revision's decoder."""

    def __init__(self, package: Path | None) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        if package is not None:
            environment[OTHER_PACKAGE] = str(package)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("host_steps.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip

    def ask(self, *words: int) -> str:
        """The answer to one line: a case or a number of steps."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(" ".join(map(str, words)) + "\n")
        stdin.flush()
        if not (answer := stdout.readline()):
            raise click.ClickException("a worker has ended")
        return answer.strip()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def package_of(revision: str) -> Iterator[Path]:
    """Directory with an installed package of a revision; `revision` may be such a directory itself."""
    if Path(revision).is_dir():
        yield Path(revision)
        return
    with tempfile.TemporaryDirectory() as folder:
        source, package = Path(folder) / "source", Path(folder) / "package"
        git = ["git", "-C", str(REPOSITORY), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(source), revision], check=True)
        try:
            install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package)]
            subprocess.run([*install, "--config-settings", "cmake.define.DFLASH_CUDA=OFF", str(source)], check=True)
            yield package
        finally:
            subprocess.run([*git, "remove", "--force", str(source)], check=True)


def measure(workers: Sequence[Worker], cases: Sequence[Case], turns: int) -> list[list[float]] | str:
    """Microseconds of each step of each worker's case, or what one of them lacks."""
    for worker, case in zip(workers, cases, strict=True):
        if (answer := worker.ask(*map(int, case))) != "ready":
            return answer
    count = max(8, min(STEPS // cases[0].requests, EMPTIED_STEPS if cases[0].emptied else STEPS))
    times: list[list[float]] = [[] for _ in workers]
    for turn in range(turns):
        for worker, own in list(zip(workers, times, strict=True))[:: 1 if turn % 2 else -1]:
            own += [1e6 * float(seconds) for seconds in worker.ask(count).split()]
    return times


def row(name: str, requests: int, times: list[list[float]] | str) -> tuple[str, ...]:
    """Cells of a table: times, a request's share of the minimum, and ratios to the other revision."""
    if isinstance(times, str):
        return name, times, "", "", "", ""
    lows, medians = list(map(min, times)), list(map(statistics.median, times))
    cells = [f"{low:.0f} / {median:.0f}" for low, median in zip(lows, medians, strict=True)]
    share = f"{lows[0] / requests:.2f}"
    if len(cells) == 1:
        return name, cells[0], share, "", "", ""
    return name, cells[0], share, cells[1], f"{lows[0] / lows[1]:.2f}", f"{medians[0] / medians[1]:.2f}"


@click.command()
@click.option("--against", metavar="REV", help="Revision, or directory of an installed package, to compare with.")
@click.option("--only", help="Part of the names of the rows to measure.")
@click.option("--turns", default=9, show_default=True, help="Measurements of each row and revision.")
def main(against: str | None, only: str | None, turns: int) -> None:
    """Print CPU time of a step beside the models."""
    tables = {"batches": steps_of_batches(), "features": steps_with_features(64)}
    click.echo(f"{cpu_model()}, one thread; microseconds of a step, minimum / median, {turns} turns")
    with package_of(against) if against is not None else tempfile.TemporaryDirectory() as package:
        packages = [None] if against is None else [None, Path(package)]
        workers = [Worker(package) for package in packages]
        for title, cases in tables.items():
            named = {name: [case] * len(workers) for name, case in cases.items()}
            show(title, ("here", "a request", against or ""), workers, named, only, turns)
        alike = [Worker(None), Worker(None)]
        shown = [f"{length} tokens" for length in LENGTHS]
        show("lengths", (shown[0], "a request", shown[1]), alike, steps_of_lengths(16), only, turns)
        for worker in [*workers, *alike]:
            worker.close()


def show(
    title: str, columns: Sequence[str], workers: Sequence[Worker], named: Mapping[str, Sequence[Case]],
    only: str | None, turns: int,
) -> None:  # fmt: skip
    """Measures the cases of each row whose name has `only` in it, one case for each worker, and prints a table."""
    rows = []
    for name, cases in named.items():
        if only is None or only in name:
            rows.append(row(name, cases[0].requests, measure(workers, cases, turns)))
            click.echo("  ".join(rows[-1]), err=True)
    if rows:
        print_table(title, ("step", *columns, "ratio of minima", "of medians"), rows)


if __name__ == "__main__":
    main()
