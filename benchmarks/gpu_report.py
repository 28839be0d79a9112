# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in one command and at most ten minutes: `make gpu-report` writes gpu-report.md.

Each step is a process with a time limit. What a step lacks is said with the command that brings it; after a failure the
next step runs. The page names the hardware and versions, and holds what every step printed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt import __version__  # noqa: E402
from dflash_trt.doctor import examine  # noqa: E402
from dflash_trt.doctor.status import MachineFinding  # noqa: E402

SECONDS = 600
GPU, PLUGIN, TENSORRT, NVCC = "NVIDIA GPU", "plugin library", "tensorrt", "nvcc"  # as doctor calls them
TAIL_LINES = 60
PAIRS = ("tiny-gpt-oss", "tiny-qwen3")
FIXTURES = REPOSITORY / "tests" / "fixtures"
DONE, FAILED, SKIPPED = "done", "**failed**", "not run"


@dataclass(frozen=True)
class Step:
    """One thing to run."""

    title: str
    command: Sequence[str]
    seconds: int
    """It may take."""
    needs: tuple[str, ...] = ()
    """What doctor must find here."""
    after: str | None = None
    """The step without whose success this one has nothing to work on."""


@dataclass
class Outcome:
    """What became of a step."""

    step: Step
    result: str
    seconds: float = 0
    why: list[str] = field(default_factory=list)
    """What it lacked, or what went wrong."""
    output: str = ""


def steps(work: Path) -> Iterator[Step]:
    """In the order in which they tell most, should the time run out."""
    python, cli = sys.executable, (sys.executable, "-m", "dflash_trt")
    ours = (python, str(REPOSITORY / "benchmarks" / "gpu_steps.py"))
    compile_kernels = (
        python,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--editable",
        ".",
        "-C",
        "cmake.define.DFLASH_CUDA=ON",
    )
    yield Step("kernels, compiled", compile_kernels, 240, (GPU, NVCC))
    yield Step("kernels, tested", (python, "-m", "pytest", "-m", "gpu", "-rs", "tests/gpu"), 120, (GPU, PLUGIN))
    for pair in PAIRS:
        engine, target = str(work / pair), str(FIXTURES / pair)
        built, planned = f"{pair}: engine", f"{pair}: plans"
        sizes = ("--max-batch-size", "2", "--max-seq-len", "512", "--max-num-tokens", "64")
        text = ("--max-tokens", "64", "--baseline", "--device", "cuda", "def main(")
        yield Step(built, (*cli, "build", f"{target}-dflash", "--target", target, "-o", engine), 60)
        yield Step(planned, (*cli, "build", "--plans-for", engine, *sizes), 90, (GPU, TENSORRT, PLUGIN), built)
        yield Step(f"{pair}: TensorRT against ONNX Runtime", (*ours, "parity", engine), 60, (GPU, TENSORRT), planned)
        yield Step(f"{pair}: decoding", (*cli, "generate", engine, "--target", target, *text), 60, (GPU,), planned)
    large = str(work / "gpt-oss-120b")
    sizes = ("--max-batch-size", "8", "--max-seq-len", "8192", "--max-num-tokens", "512")
    yield Step("gpt-oss-120b's drafter, random weights: engine", (*ours, "large", large), 120, (GPU, TENSORRT, PLUGIN))
    yield Step(
        "gpt-oss-120b's drafter, random weights: plans",
        (*cli, "build", "--plans-for", large, *sizes),
        180,
        (GPU, TENSORRT, PLUGIN),
        "gpt-oss-120b's drafter, random weights: engine",
    )
    bench = (python, "benchmarks/bench_kv_injection_attention.py", "--runs", "20", "--max-rows", "131072")
    bench += ("--only", "gpt-oss", "--peer", "FlashAttention", "--peer", "cudnn")  # the others compile for minutes
    yield Step("attention kernel, measured", bench, 120, (GPU, PLUGIN))


def run_steps(work: Path, seconds: float = SECONDS) -> list[Outcome]:
    """Every step's outcome; one that fails or is not run keeps no other from running, except what builds on it."""
    end, outcomes = time.monotonic() + seconds, dict[str, Outcome]()
    for step in steps(work):
        outcome = _try(step, outcomes, end - time.monotonic())
        outcomes[step.title] = outcome
        click.echo(f"{outcome.result.strip('*')}: {step.title} ({outcome.seconds:.0f} s)", err=True)
    return list(outcomes.values())


def _try(step: Step, earlier: dict[str, Outcome], left: float) -> Outcome:
    if lacking := [finding for finding in _missing() if name_of(finding) in step.needs]:
        return Outcome(step, SKIPPED, why=[f"lacks {name_of(finding)}" for finding in lacking])
    if step.after is not None and earlier[step.after].result != DONE:
        return Outcome(step, SKIPPED, why=[f"needs “{step.after}”"])
    if left < 1:
        return Outcome(step, SKIPPED, why=[f"the {SECONDS} s are over: {shlex.join(step.command)}"])
    begin = time.monotonic()
    status, output = run(step.command, min(step.seconds, left))
    why = {None: [f"took more than {min(step.seconds, left):.0f} s"], 0: []}.get(status, [f"exit status {status}"])
    return Outcome(step, DONE if status == 0 else FAILED, time.monotonic() - begin, why, output)


def name_of(finding: MachineFinding) -> str:
    """What doctor calls it, without the reason that it adds to what is missing."""
    return finding.name.partition(" (")[0]


def _missing() -> list[MachineFinding]:
    return [finding for finding in examine() if finding.found is None]


def run(command: Sequence[str], seconds: float) -> tuple[int | None, str]:
    """Exit status, None where the time ran out, and what was printed; nothing of the command outlives it."""
    environment = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=REPOSITORY,
            env=environment, start_new_session=True,
        )  # fmt: skip
        status: int | None
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        output.seek(0)
        return status, output.read().replace(f"{REPOSITORY}/", "")


def page(outcomes: Sequence[Outcome], machine: Sequence[MachineFinding], commit: str) -> str:
    """The report as Markdown."""
    counts = {result: sum(outcome.result == result for outcome in outcomes) for result in (DONE, FAILED, SKIPPED)}
    summary = ", ".join(f"{count} {result.strip('*')}" for result, count in counts.items())
    lines = [f"# dflash-trt {__version__} on a GPU", "", f"Commit {commit}. {summary}.", "", "## Machine", ""]
    lines += _table(("what", "found"), [(name_of(finding), _found(finding)) for finding in machine])
    lines += ["", "## Steps", ""]
    rows = [(o.step.title, o.result, f"{o.seconds:.0f}" if o.seconds else "", "; ".join(o.why)) for o in outcomes]
    lines += _table(("step", "result", "seconds", "why"), rows)
    lacked = {why.removeprefix("lacks ") for outcome in outcomes for why in outcome.why}
    if fixes := [f"* {name_of(finding)}: {finding.fix}" for finding in machine if name_of(finding) in lacked]:
        lines += ["", "What was missing comes so; then `make gpu-report` again:", "", *fixes]
    for outcome in outcomes:
        if outcome.result != SKIPPED:
            lines += ["", f"### {outcome.step.title}: {outcome.result.strip('*')}", "", *_printed(outcome)]
    return "\n".join(lines) + "\n"


def _found(finding: MachineFinding) -> str:
    reason = finding.name.partition(" (")[2].removesuffix(")")
    return finding.found or (f"missing: {reason}" if reason else "missing")


def _printed(outcome: Outcome) -> list[str]:
    printed = outcome.output.rstrip().splitlines()
    left_out = len(printed) - TAIL_LINES
    head = [f"... {left_out} lines before these"] if left_out > 0 else []
    # Indented, so that nothing that a step prints ends the block.
    command = shlex.join(outcome.step.command).replace(f"{REPOSITORY}/", "")
    return [f"    $ {command}", *(f"    {line}" for line in [*head, *printed[-TAIL_LINES:]])]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [list(columns), ["---"] * len(columns), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells]


def _commit() -> str:
    status, output = run(("git", "describe", "--always", "--dirty", "--exclude=*"), 30)
    return output.strip() if status == 0 else "not known"


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("gpu-report.md"), show_default=True)
def main(output: Path) -> None:
    """Run every step and write the page; exits with 0 whatever the steps say, because the page says it."""
    with tempfile.TemporaryDirectory() as work:
        outcomes = run_steps(Path(work))
    output.write_text(page(outcomes, examine(), _commit()))
    click.echo(output)


if __name__ == "__main__":
    main()
