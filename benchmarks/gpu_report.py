# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in one command: `make gpu-report` writes gpu-report.md in ten minutes.

Before the steps begin it brings what a machine with a driver and torch lacks: TensorRT and nvcc, as wheels, and the
kernels, compiled for the GPU at hand. Without network it uses what is there: with torch, nvcc and a compiler both
models decode in torch, and what needs TensorRT is counted as lacking it. --seconds ends a run early: the steps that
tell most come first. --rehearse tries the steps in torch on a CPU, small.

Each step is a process of its own with a time limit: it passed, failed, or lacked something, which is named with the
command that brings it. After a failure the next step runs. The page is docs/gpu.md, or what an earlier run has written
in its place, with a section for this card and commit before the others: versions, results, and the end of what each
step printed; `cp gpu-report.md docs/gpu.md` takes it over. It is written before and after each step; a log beside it
holds all that was printed. --rest goes on with the steps that have not passed on this card and commit.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import NoReturn

import click
import msgspec

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpu_report_steps import (  # noqa: E402
    KERNELS,
    NETWORK,
    REHEARSED_SECONDS,
    SANITIZER,
    TORCH,
    Step,
    find_nvcc,
    setup_steps,
    steps,
    words,
)
from dflash_trt import __version__  # noqa: E402
from dflash_trt.cli.doctor_machine import MachineFinding, package_version  # noqa: E402

SECONDS = 600
"""No step runs later than so long after the setup."""
PASSED, FAILED, LACKED, RUNS = "passed", "**failed**", "lacked", "**cut off**"
FAILED_LINES, LISTED = 80, 12
LEAST_SHARE = 1 / 3
"""Part of a step's time limit, without which it is not begun: it would be cut off, and a shorter one may follow."""
MARK = "<!-- Reports of benchmarks/gpu_report.py, newest first -->\n"
VERSIONS = ("Python", "CPU", "transformers", "onnxruntime", "nvcc", "tensorrt", "NVIDIA driver", "CUDA of the driver")
NO_GPU = {"cpu": "Rehearsed on a CPU, where sizes and times mean nothing", "cuda": "No GPU"}
FIXES = {
    TORCH: "a GPU, and make gpu-report TORCH='torch --index-url URL', with pytorch.org's URL for its driver",
    NETWORK: "a route to pypi.org, or the packages installed by hand",
    SANITIZER: "the CUDA toolkit, its bin on PATH",
}
IS_ONLINE = "import socket; socket.create_connection(('pypi.org', 443), 3)"
EXAMINE = "import dflash_trt.cli.doctor_machine as m, msgspec; print(msgspec.json.encode(m.examine()).decode())"


@dataclass
class Outcome:
    """Outcome of a step."""

    step: Step
    result: str
    seconds: float = 0
    why: list[str] = field(default_factory=list)
    """Missing requirement, or error."""
    command: str = ""
    output: str = ""

    @property
    def title(self) -> str:
        """The step's."""
        return self.step.title


class Report:
    """The outcomes so far, and the page of them."""

    def __init__(self, work: Path, page: Path, commit: str, device: str, libraries: Sequence[str]) -> None:
        self.end = math.inf
        """No step runs later, by time.monotonic."""
        self.outcomes: list[Outcome] = []
        self.machine: list[MachineFinding] = []
        self.gpu: str | None = None
        """The first one, as torch describes it."""
        self._work, self._page, self._commit, self._device, self._libraries = work, page, commit, device, libraries
        self._template = (page if page.exists() else REPOSITORY / "docs" / "gpu.md").read_text()
        if MARK not in self._template:
            raise click.UsageError(f"-o: expected a new file, or a page of an earlier run, found {page}")
        self._log = page.with_suffix(".log")

    @property
    def title(self) -> str:
        """The section's."""
        return f"## {self.gpu.partition(', SM')[0] if self.gpu else NO_GPU[self._device]}, commit {self._commit}"

    @property
    def passed_before(self) -> set[str]:
        """Titles of the steps that passed on this card and commit, as the page says so far."""
        sections = re.split(r"^(?=## )", self._template, flags=re.MULTILINE)
        ours = "".join(section for section in sections if section.partition("\n")[0] == self.title)
        return set(re.findall(rf"^\| (.+?) \| {PASSED} \|", ours, re.MULTILINE))

    @property
    def capability(self) -> str | None:
        """Compute capability of the GPU."""
        return self.gpu.partition(", SM ")[2].partition(",")[0] if self.gpu else None

    def set_up(self) -> None:
        """Looks for a GPU, brings what is missing, and looks at the machine when all is there that there will be."""
        if self._device == "cuda":
            found = self.run(Step(TORCH, "{python} -c {gpu_of_torch}", 120, shown=3))
            self.gpu = found.output.splitlines()[-1] if found.result == PASSED else None
            cuda = re.search(r"CUDA (\d+)", found.output)
            online = run((sys.executable, "-c", IS_ONLINE), 6)[0] == 0
            if not online:
                self.machine = [MachineFinding(name=NETWORK, found=None)]
            for step in setup_steps(max(12, min(13, int(cuda[1]) if cuda else 13)), self.capability, online=online):
                self.run(step)
        self.machine = [*self.machine, *examine()]

    def missing(self) -> set[str]:
        """Requirements of steps that this machine lacks."""
        done = {outcome.title for outcome in self.outcomes if outcome.result == PASSED}
        missing = {name_of(finding) for finding in self.machine if finding.found is None}
        return missing | ({TORCH, KERNELS} - done) | (set() if shutil.which(SANITIZER, path=_path()) else {SANITIZER})

    def run(self, step: Step) -> Outcome:
        """Runs one step; one that fails keeps no other from running, except what builds on it."""
        command = shlex.split(step.command.format_map(self._words()))
        shown = _shown(shlex.join(command)).replace(f"{self._work}/", "").replace(sys.executable, "python3", 1)
        outcome = Outcome(step, LACKED, why=self._lacking(step), command=" ".join(shown.split()))
        self.outcomes.append(outcome)
        if not outcome.why:
            outcome.result = RUNS
            self.write()
            begin, seconds = time.monotonic(), min(step.seconds, self.end - time.monotonic())
            threads = {"OMP_NUM_THREADS": "1"} if self._device == "cpu" else {}  # it may be busy; more would wait
            status, outcome.output = run(command, seconds, {**threads, **step.environment})
            outcome.seconds, outcome.output = time.monotonic() - begin, outcome.output.replace(f"{self._work}/", "")
            outcome.result, outcome.why = (PASSED, []) if status == 0 else (FAILED, [_problem(status, seconds, step)])
        self.write()
        with self._log.open("a") as log:
            log.write(f"\n{step.title}: {outcome.result}, {outcome.seconds:.0f} s {'; '.join(outcome.why)}\n")
            log.write(f"$ {outcome.command}\n{outcome.output}")
        click.echo(f"{outcome.result.strip('*')}: {step.title} ({outcome.seconds:.0f} s)", err=True)
        return outcome

    def _words(self) -> dict[str, str]:
        libraries = shlex.join(f"--library={library}" for library in self._libraries)
        return words(self._work, self.capability, self._device) | {"libraries": libraries}

    def _lacking(self, step: Step) -> list[str]:
        earlier = {outcome.title: outcome.result for outcome in self.outcomes}
        lacking = [step.lacks] if step.lacks else [name for name in step.needs if name in self.missing()]
        lacking = lacking or [f"“{title}”" for title in step.after if earlier.get(title) != PASSED]
        return lacking or (["time"] if self.end - time.monotonic() < LEAST_SHARE * step.seconds else [])

    def write(self) -> None:
        """Writes the page: docs/gpu.md as it was when the report began, with this section before the other reports."""
        head, _, rest = self._template.partition(MARK)
        new = self._page.with_name(f".{self._page.name}.new")
        new.write_text("\n".join([f"{head}{MARK}", self.title, "", *self.section()]) + f"\n{rest}")
        new.replace(self._page)

    def section(self) -> list[str]:
        """This report as Markdown, without its title."""
        counts = {
            result: sum(outcome.result == result for outcome in self.outcomes) for result in (PASSED, FAILED, LACKED)
        }
        found = {name_of(finding): finding.found for finding in self.machine}
        versions = [f"{name} {found[name]}" for name in VERSIONS if found.get(name)]
        versions += [f"triton {version}" for version in [package_version("triton")] if version]
        lines = [f"{'; '.join([*filter(None, [self.gpu]), *versions, f'dflash-trt {__version__}'])}. {date.today()}:"]
        lines += [", ".join(f"{count} {result.strip('*')}" for result, count in counts.items()) + ".", ""]
        lines += ["| step | result | seconds | what went wrong |", "|---|---|---|---|"]
        ran = [outcome for outcome in self.outcomes if outcome.result != LACKED]
        lines += [f"| {o.title} | {o.result} | {o.seconds:.0f} | {_cell(o.why)} |" for o in ran]
        lines += ["", *self._lacked()]
        for outcome in [outcome for outcome in ran if _printed(outcome)]:
            lines += ["", f"### {outcome.title}: {outcome.result.strip('*')}", "", *_printed(outcome)]
        return lines

    def _lacked(self) -> list[str]:
        """A line for the first thing that steps lacked: how many or which, and the command that brings it."""
        fixes = FIXES | {name_of(finding): finding.fix for finding in self.machine if finding.fix}
        titles: dict[str, list[str]] = {}
        for outcome in self.outcomes:
            if outcome.result == LACKED:
                titles.setdefault(outcome.why[0], []).append(outcome.title)
        lines = []
        for why, without in titles.items():
            which = "; ".join(without) if len(without) <= LISTED else f"{len(without)} steps"
            lines.append(f"* For want of {why}: {which}." + (f" Bring it: {fixes[why]}" if why in fixes else ""))
        return lines


def _problem(status: int | None, seconds: float, step: Step) -> str:
    if status is None:
        short = "" if seconds >= step.seconds else f", all that was left of its {step.seconds:.0f}"
        return f"took more than {seconds:.0f} s{short}"
    return f"exit status {status}" if status >= 0 else f"ended by {signal.Signals(-status).name}"


def _cell(texts: Iterable[str]) -> str:
    return "; ".join(texts).replace("|", "\\|").replace("\n", " ")


def _shown(text: str) -> str:
    return text.replace(f"{REPOSITORY}/", "")


def _printed(outcome: Outcome) -> list[str]:
    """The end of what it printed; of a failure the beginning, too, where the first one stands."""
    printed = outcome.output.strip("\n").splitlines()
    most = FAILED_LINES if outcome.result == FAILED else outcome.step.shown
    if len(printed) > most:
        head = most // 2 if outcome.result == FAILED else 0
        printed[head : len(printed) - most + head] = ["..."] if head else []
    printed = [f"$ {outcome.command}", *printed] if printed else []
    return [f"    {line}" for line in printed]  # indented, so that nothing that a step prints ends the block


def examine() -> list[MachineFinding]:
    """Findings of doctor in a separate process, because this one has loaded the previously compiled module."""
    status, output = run((sys.executable, "-c", EXAMINE), 120)
    try:
        return msgspec.json.decode(output.splitlines()[-1], type=list[MachineFinding])
    except (IndexError, msgspec.DecodeError):  # the last line of what ended it, in the place of findings
        problem = (output.splitlines() or [f"exit status {status}"])[-1]
        return [MachineFinding(name=f"doctor ({problem})", found=None)]


def name_of(finding: MachineFinding) -> str:
    """Name that doctor uses, without the reason that it adds if something is missing."""
    return finding.name.partition(" (")[0]


def _path() -> str:
    """PATH with the folder of nvcc, in which a toolkit has its other tools."""
    nvcc = find_nvcc()
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *([str(Path(nvcc).parent)] if nvcc else [])])


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> tuple[int | None, str]:
    """Exit status, None where the time ran out, and what was printed; nothing of the command outlives it."""
    here = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # tables are as in a pipe
    settings = {"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "PATH": _path()}
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            process = subprocess.Popen(
                list(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=REPOSITORY,
                env={**here, **settings, **(environment or {})}, process_group=0,
            )  # fmt: skip
        except OSError as problem:  # the program itself is missing
            return 127, str(problem)
        status: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # a driver that hangs holds even a killed process
                process.wait(timeout=10)
        output.seek(0)
        return status, _shown(output.read())


def chosen(every: Sequence[Step], only: Sequence[str], done: Collection[str] = ()) -> list[Step]:
    """The steps not `done` that have one of `only` in their titles, all for none, and those that they come after."""
    found = {part: {step.title for step in every if part.lower() in step.title.lower()} for part in only or ("",)}
    for part, titles in found.items():
        if not titles:
            every_title = "; ".join(step.title for step in every)
            raise click.UsageError(f"--only: expected part of a step's title, found {part!r}: {every_title}")
    wanted = set[str]().union(*found.values()) - set(done)
    while before := {title for step in every if step.title in wanted for title in step.after} - wanted:
        wanted |= before
    return [step for step in every if step.title in wanted]


def _commit() -> str:
    status, output = run(("git", "describe", "--always", "--dirty", "--exclude=*"), 30)
    return output.strip() if status == 0 else "not known"


def _terminated(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)  # so that the step that runs is ended, too


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("gpu-report.md"), show_default=True)
@click.option("--only", multiple=True, metavar="NAME", help="Steps with NAME in their titles, and what they build on.")
@click.option("--rest", is_flag=True, help="Steps that have not passed here, as the page says.")
@click.option("--seconds", type=click.IntRange(min=1), default=SECONDS, show_default=True, help="Time after the setup.")
@click.option("--commit", help="The commit that this tree is of, where git is not at hand.")
@click.option(
    "--library", "libraries", multiple=True, metavar="NAME=PATH", help="Another build, timed beside this one."
)
@click.option("--rehearse", is_flag=True, help="On a CPU: install nothing, and run what can be run there, small.")
def main(
    output: Path, only: tuple[str, ...], rest: bool, seconds: int, commit: str | None, libraries: tuple[str, ...],
    rehearse: bool,
) -> None:  # fmt: skip
    """Run every step and write the page; exits with 0 whatever the steps say, because the page says it."""
    signal.signal(signal.SIGTERM, _terminated)
    device = "cpu" if rehearse else "cuda"
    with tempfile.TemporaryDirectory() as work:
        report = Report(Path(work), output, commit or _commit(), device, libraries)
        chosen(steps(None, device), only)
        report.set_up()
        report.end = time.monotonic() + seconds * (REHEARSED_SECONDS if rehearse else 1)
        for step in chosen(steps(report.capability, device), only, report.passed_before if rest else ()):
            report.run(step)
    click.echo(output)


if __name__ == "__main__":
    main()
