# SPDX-License-Identifier: Apache-2.0
"""Everything that needs a GPU, in one command: `make gpu-report` writes gpu-report.md in ten minutes.

Before they begin it brings what a bare machine with a driver lacks: TensorRT and nvcc, as wheels that suit the driver,
and the kernels, compiled for the GPU at hand. Without network it uses what is there: with torch, nvcc and a compiler
both models decode in torch, and what needs TensorRT is named as lacking; on an H100 with 16 cores that is
estimated at six minutes before the sanitizer, and --seconds ends a run earlier. --rehearse tries the steps in torch on
a CPU. Each step is a process with a time limit: it passed, failed, or lacked something, which is named with the command
that brings it. After a failure the next step runs. The page names the hardware and versions, holds what every step
printed, and is written anew after each.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import click
import msgspec

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt import __version__  # noqa: E402
from dflash_trt.cli.doctor_machine import MachineFinding, gpu_findings, package_version  # noqa: E402
from dflash_trt.engine.plans.machine import check_precision, check_served, sm_name, sm_of  # noqa: E402
from dflash_trt.engine.plans.tensorrt_api import RUNTIMES  # noqa: E402
from dflash_trt.errors import BuildError  # noqa: E402
from dflash_trt.quantize.recipe import FP8_KV, load_recipe  # noqa: E402

SECONDS = 600
"""No step begins later than so long after the machine is set up."""
# As doctor calls them, and what a step of ours brings.
GPU, PLUGIN, TENSORRT, TRTLLM, TORCH = "NVIDIA GPU", "plugin library", "tensorrt", "tensorrt_llm", "torch with CUDA"
RTX, RTX_LIBRARIES = RUNTIMES["tensorrt_rtx"].package, "tensorrt_rtx_cu13_libs"
KERNELS, NETWORK, INDEX = "kernels, compiled", "network", ("pypi.org", 443)
TAIL_LINES = 60
PAIRS = ("tiny-gpt-oss", "tiny-qwen3")
RECIPES = ("bf16", "fp8", f"fp8{FP8_KV}", "int4-w4a16", "nvfp4", "nvfp4-native", "mixed-nvfp4-fp8")
FAR_ROWS = 110000
"""Rows of each of five slots: 8 layers, 8 heads and 64 numbers of each make them 1.05 x 2^31 elements."""
FIXTURES = REPOSITORY / "tests" / "fixtures"
PASSED, FAILED, LACKED = "passed", "**failed**", "lacked"
# By CUDA version of the driver; that of 13 was run on a CPU, those of 12 bring no nvcc in some releases.
NVCC_WHEELS = {
    13: ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl"),
    12: ("cuda-nvcc", "cuda-runtime", "cuda-cccl"),
}
NVCC_SUFFIXES = {13: "==13.0.*", 12: "-cu12==12.9.*"}
FIRST_KERNELS = 8.0
"""The compute capability that the kernels begin with."""
PYTHON, PIP = (sys.executable,), (sys.executable, "-m", "pip", "install")
CLI = (sys.executable, "-m", "dflash_trt")
TORCH_RECIPES = ("bf16", "fp8", "nvfp4")
DECODING, SANITIZER = "tests/gpu/test_decode.py", "tests/gpu/test_sanitizer.py"
SHAPES = {"cuda": ("qwen3-8b", "gpt-oss-20b"), "cpu": ("tiny", "tiny-gpt-oss")}
"""Published ones where there is a GPU."""
RUNNING = {"cuda": (GPU, TORCH, KERNELS), "cpu": ()}
"""What decoding in torch needs."""
TITLES = {"cuda": "on a GPU", "cpu": "rehearsed on a CPU: sizes and times mean nothing"}
TORCH_FIX = "make gpu-report TORCH='torch --index-url URL', with the URL that pytorch.org names for the driver's CUDA"
NETWORK_FIX = "a route to pypi.org, or the packages installed by hand"
OURS = (sys.executable, str(REPOSITORY / "benchmarks" / "gpu_steps.py"))


@dataclass(frozen=True)
class Step:
    """One thing to run."""

    title: str
    command: Sequence[str]
    seconds: int
    """It may take."""
    needs: tuple[str, ...] = ()
    """What the machine must have."""
    after: tuple[str, ...] = ()
    """The steps without whose success this one has nothing to work on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: str | None = None
    """What this machine cannot give it, whatever is installed."""


@dataclass
class Outcome:
    """What became of a step."""

    step: Step
    result: str
    seconds: float = 0
    why: list[str] = field(default_factory=list)
    """What it lacked, or what went wrong."""
    output: str = ""


@dataclass(frozen=True)
class Gpu:
    """What there is to install and compile for; of the first GPU."""

    compute_capability: str
    cuda: int
    """Major version that the driver runs: 12, or 13, the newest that wheels were looked up for."""


def find_gpu() -> Gpu | None:
    """None without a driver or a GPU."""
    found = {finding.name: finding.found for finding in gpu_findings()}
    described, cuda = found.get("GPU 0"), found.get("CUDA of the driver")
    if described is None or cuda is None:
        return None
    return Gpu(described.partition(", SM ")[2].partition(",")[0], max(12, min(13, int(cuda.partition(".")[0]))))


def find_nvcc() -> str | None:
    """On PATH, in the toolkit's usual place, or of a wheel."""
    wheels = Path(sysconfig.get_path("purelib"), "nvidia")
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin"), *sorted(wheels.glob("*/bin"), reverse=True)]
    return shutil.which("nvcc") or next((str(place / "nvcc") for place in places if (place / "nvcc").is_file()), None)


def setup_steps(gpu: Gpu | None) -> Iterator[Step]:
    """What a bare machine lacks; each is made when the one before it has run."""
    cuda = gpu.cuda if gpu else 13  # what is printed where there is no GPU
    if package_version(TENSORRT) is None:
        wheel = f"tensorrt-cu{cuda}>={'.'.join(map(str, RUNTIMES['tensorrt'].oldest))}"
        yield Step("TensorRT, installed", (*PIP, wheel), 240, (GPU, NETWORK))
    if package_version(RTX) is None and gpu and not _unserved(gpu):
        oldest = ".".join(map(str, RUNTIMES["tensorrt_rtx"].oldest))
        wheels = (f"{name}>={oldest}" for name in (RTX, RTX_LIBRARIES))
        yield Step("TensorRT-RTX, installed", (*PIP, *wheels), 240, (GPU, NETWORK))
    if find_nvcc() is None:
        # All of one release: nvcc's own dependencies are unbounded, and a newer compiler behind it writes newer PTX.
        names = (f"nvidia-{name}{NVCC_SUFFIXES[cuda]}" for name in NVCC_WHEELS[cuda])
        yield Step("nvcc, installed", (*PIP, *names), 120, (GPU, NETWORK))
    yield Step(TORCH, (*OURS, "torch-cuda"), 60, (GPU,))
    yield compile_kernels(gpu, online=is_online())


@cache
def is_online() -> bool:
    """Whether packages can be fetched."""
    try:
        socket.create_connection(INDEX, timeout=3).close()
    except OSError:
        return False
    return True


def compile_kernels(gpu: Gpu | None, *, online: bool = True) -> Step:
    """For the GPU at hand only: a family such as 100f needs CUDA 12.9, which older GPUs do not.

    Without network by cmake, with the nanobind that is there, where pip would fetch its own; not again where a build
    is newer than its sources.
    """
    nvcc, lacks = find_nvcc(), None
    capability = gpu.compute_capability if gpu else "9.0"
    if float(capability) < FIRST_KERNELS:
        lacks = f"a GPU of SM {FIRST_KERNELS} or newer for the kernels; this one is of SM {capability}"
    elif nvcc is None:
        lacks = "nvcc: its wheel brought none; install the CUDA toolkit: https://developer.nvidia.com/cuda-downloads"
    architecture = capability.replace(".", "") + ("a" if float(capability) >= 9 else "")
    defines = ("DFLASH_CUDA=ON", f"DFLASH_CUDA_ARCHITECTURES={architecture}")
    words = [word for define in defines for word in ("-C", f"cmake.define.{define}")]
    by_pip = (*PIP, "--no-deps", "--editable", ".", *words)
    by_cmake = (*PYTHON, "benchmarks/compile_kernels.py", "--if-stale", *defines)
    environment = _compiler(nvcc) if nvcc else {}
    return Step(KERNELS, by_pip if online else by_cmake, 240, (GPU,), lacks=lacks, environment=environment)


def _compiler(nvcc: str) -> dict[str, str]:
    """A wheel has its libraries in lib, where nvcc looks in lib64."""
    places = [str(Path(nvcc).parents[1] / "lib"), os.environ.get("LIBRARY_PATH")]
    return {"CUDACXX": nvcc, "LIBRARY_PATH": ":".join(place for place in places if place)}


def steps(work: Path, gpu: Gpu | None, device: str = "cuda") -> Iterator[Step]:
    """In the order in which they tell most, should the time run out; `cpu` rehearses what runs there."""
    plans, running = (GPU, TORCH, TENSORRT, PLUGIN), RUNNING[device]
    tests = (*PYTHON, "-m", "pytest", "-m", "gpu", "-rs", *(["--collect-only", "-q"] if device == "cpu" else []))
    yield from _torch_steps(PAIRS[0], work, device)
    yield Step("kernels, tested", (*tests, "tests/gpu", "--ignore", SANITIZER, "--ignore", DECODING), 120, running)
    yield Step("decoding in torch, tested", (*tests, DECODING), 180, running)
    for recipe in TORCH_RECIPES:
        yield _pass_step(recipe, work, gpu, device)
    yield from _tool_steps(PAIRS[0], work, device)
    bench = (*PYTHON, "benchmarks/bench_kv_injection_attention.py", "--runs", "20", "--max-rows", "131072")
    peers = ("--only", "gpt-oss", "--peer", "FlashAttention", "--peer", "cudnn")  # the others compile for minutes
    yield Step("attention kernel, measured", (*bench, *peers), 120, RUNNING["cuda"])
    yield from _decoding_steps(device)
    yield from _plan_steps(PAIRS[0], work)
    yield from _rtx_steps(PAIRS[0], work, gpu)
    for recipe in RECIPES:
        command = (*OURS, "drafter", recipe, str(work / recipe))
        title = f"gpt-oss-120b's drafter, two layers, {recipe}: plans, fused layers, latency"
        yield Step(title, command, 120, plans, lacks=_lacking_precision(recipe, gpu))
    large, built = str(work / "large"), "gpt-oss-120b's drafter, whole: plans, fused layers, latency"
    sizes = ("--layers", "8", "--max-batch-size", "4", "--max-seq-len", str(FAR_ROWS))
    yield Step(built, (*OURS, "drafter", "bf16", large, *sizes), 240, plans)
    yield Step("a context cache beyond 2^31 elements", (*OURS, "far-cache", large), 60, plans, (built,))
    yield _build_step(PAIRS[1], work, plans)
    yield from _plan_steps(PAIRS[1], work)
    contract = (*PYTHON, "-m", "tests.contract.tensorrt_llm_arguments", sysconfig.get_path("purelib"))
    yield Step("TensorRT-LLM's contract", contract, 60, (TRTLLM,))
    yield Step("kernels, sanitized", (*tests, SANITIZER), 240, running)


def _torch_steps(pair: str, work: Path, device: str) -> Iterator[Step]:
    """A trained pair of the fixtures, decoded with the drafter in torch, whose kernels it compiles."""
    yield _build_step(pair, work)
    decode = (*OURS, "decode", str(work / pair), str(FIXTURES / pair), "--executor", "torch", "--device", device)
    yield Step(f"{pair}: decoding in torch", decode, 150, RUNNING[device], (_built(pair),))


def _build_step(pair: str, work: Path, needs: tuple[str, ...] = ()) -> Step:
    target = str(FIXTURES / pair)
    build = (*CLI, "build", f"{target}-dflash", "--target", target, "-o", str(work / pair))
    return Step(_built(pair), build, 60, needs)


def _pass_step(recipe: str, work: Path, gpu: Gpu | None, device: str) -> Step:
    """Time of a large drafter's pass; its weights are drawn once for all recipes."""
    command = [*OURS, "torch-pass", recipe, str(work / f"torch-{recipe}"), "--device", device]
    if device == "cpu":
        command += ["--layers", "1", "--batch-sizes", "1", "--contexts", "64"]
    title = f"gpt-oss-120b's drafter in torch, {recipe}: latency"
    return Step(title, command, 120, RUNNING[device], lacks=_lacking_precision(recipe, gpu))


def _decoding_steps(device: str) -> Iterator[Step]:
    """Both published shapes: few tokens, so that the models' making takes longer than their decoding."""
    tokens, batch = ("48", "8") if device == "cuda" else ("8", "2")
    sizes = ("--rounds", "1", "--tokens", tokens, "--num-prompts", "2", "--batch", "1", "--batch", batch)
    for shape in SHAPES[device]:
        command = (*PYTHON, "benchmarks/bench_gpu.py", "--shape", shape, *sizes, "--device", device)
        yield Step(f"decoding at {shape}'s shape, beside transformers", command, 150, RUNNING[device])


def _tool_steps(pair: str, work: Path, device: str) -> Iterator[Step]:
    """The commands that run a target or train on a GPU."""
    engine, target, features = str(work / pair), str(FIXTURES / pair), str(work / "features.safetensors")
    draft, running, placed = f"{target}-dflash", RUNNING[device], ("--device", device)
    sizes = ("--max-tokens", "96") if device == "cuda" else ("--max-tokens", "64", "--max-prompts", "16")
    captured, prompts = f"{pair}: capture", ("--prompts", str(FIXTURES / "prompts.jsonl"), *sizes)
    yield Step(captured, (*CLI, "capture", draft, "--target", target, *prompts, "-o", features, *placed), 120, running)
    answers, before = ("--features", features, *placed), (_built(pair), captured)
    yield Step(f"{pair}: verify of what was captured", (*CLI, "verify", engine, *answers), 60, running, before)
    training = ("-o", str(work / "recovered"), "--recipe", "nvfp4", "--steps", "40", "--learning-rate", "5e-4")
    yield Step(f"{pair}: recovery for NVFP4", (*CLI, "recover", draft, *training, *answers), 90, running, (captured,))


def _built(pair: str) -> str:
    return f"{pair}: engine"


def _plan_steps(pair: str, work: Path) -> Iterator[Step]:
    """A trained pair with plans."""
    engine, target = str(work / pair), str(FIXTURES / pair)
    built, planned = _built(pair), f"{pair}: plans"
    plans, running = (GPU, TENSORRT, PLUGIN), (GPU, TORCH, TENSORRT)
    sizes = ("--max-batch-size", "2", "--max-seq-len", "512", "--max-num-tokens", "64")
    yield Step(planned, (*CLI, "build", "--plans-for", engine, *sizes), 90, plans, (built,))
    yield Step(f"{pair}: TensorRT against ONNX Runtime", (*OURS, "parity", engine), 60, running, (planned,))
    yield Step(f"{pair}: CUDA graphs of the plans", (*OURS, "capture", engine), 60, running, (planned,))
    yield Step(f"{pair}: decoding", (*OURS, "decode", engine, target), 60, running, (planned,))


def _rtx_steps(pair: str, work: Path, gpu: Gpu | None) -> Iterator[Step]:
    """A trained pair with plans of TensorRT-RTX, which compiles kernels when a plan is first opened and keeps them."""
    capability = gpu.compute_capability if gpu else "12.0"
    engine, target, lacks = str(work / f"{pair}-rtx"), str(FIXTURES / pair), _unserved(gpu) if gpu else None
    planned, running = f"{pair}: plans by TensorRT-RTX", (GPU, TORCH, RTX)
    sizes = ("--max-batch-size", "2", "--max-seq-len", "512", "--max-num-tokens", "64")
    build = ("build", f"{target}-dflash", "--target", target, "-o", engine, "--gpu", sm_name(capability), *sizes)
    yield Step(planned, (*CLI, *build), 90, (GPU, RTX, PLUGIN), lacks=lacks)
    for which in ("first", "second"):
        title = f"{pair}: {which} start with TensorRT-RTX"
        yield Step(title, (*OURS, "start", engine), 120, running, (planned,), lacks=lacks)
    for title, step in (("parity", "parity"), ("CUDA graphs", "capture")):
        command = (*OURS, step, engine)
        yield Step(f"{pair}: {title} with TensorRT-RTX", command, 60, running, (planned,), lacks=lacks)
    decode = (*OURS, "decode", engine, target)
    yield Step(f"{pair}: decoding with TensorRT-RTX", decode, 60, running, (planned,), lacks=lacks)


def _unserved(gpu: Gpu) -> str | None:
    """Why TensorRT-RTX has no plans for a GPU."""
    try:
        check_served([gpu.compute_capability])
    except BuildError as refused:
        return refused.message
    return None


def _lacking_precision(recipe: str, gpu: Gpu | None) -> str | None:
    """What the GPU lacks for a recipe's weights."""
    file = load_recipe(recipe)
    algorithms = {rule.algorithm for rule in file.rules} | ({"FP8"} if file.fp8_kv_cache else set())
    try:
        check_precision(algorithms - {"none"}, [sm_of(gpu.compute_capability if gpu else "10.0")])
    except BuildError as refused:
        return refused.message
    return None


class Report:
    """The outcomes so far, and the machine as the last look at it found it."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        """Time for the steps behind the setup."""
        self.end = math.inf
        """No step begins after it."""
        self.outcomes: list[Outcome] = []
        self.machine: list[MachineFinding] = []

    def missing(self) -> set[str]:
        """What steps may need and this machine has not."""
        done = {outcome.step.title for outcome in self.outcomes if outcome.result == PASSED}
        missing = {name_of(finding) for finding in self.machine if finding.found is None}
        offline = set() if is_online() else {NETWORK}
        return missing | offline | ({TORCH, KERNELS} - done)

    def run(self, step: Step) -> Outcome:
        """Runs one step; one that fails keeps no other from running, except what builds on it."""
        outcome = self._try(step)
        self.outcomes.append(outcome)
        click.echo(f"{outcome.result.strip('*')}: {step.title} ({outcome.seconds:.0f} s)", err=True)
        return outcome

    def _try(self, step: Step) -> Outcome:
        left = self.end - time.monotonic()
        earlier = {outcome.step.title: outcome.result for outcome in self.outcomes}
        if lacking := [name for name in step.needs if name in self.missing()]:
            return Outcome(step, LACKED, why=lacking)
        if step.lacks is not None:
            return Outcome(step, LACKED, why=[step.lacks])
        if undone := [f"“{title}”" for title in step.after if earlier.get(title) != PASSED]:
            return Outcome(step, LACKED, why=undone)
        if left < 1:
            return Outcome(step, LACKED, why=[f"time: {shlex.join(step.command)}"])
        begin, seconds = time.monotonic(), min(step.seconds, left)
        try:
            status, output = run(step.command, seconds, step.environment)
        except OSError as problem:  # the program itself is missing
            return Outcome(step, FAILED, why=[str(problem)])
        why = {None: [f"took more than {seconds:.0f} s"], 0: []}.get(status, [f"exit status {status}"])
        return Outcome(step, PASSED if status == 0 else FAILED, time.monotonic() - begin, why, output)


def make_report(
    report: Report,
    work: Path,
    output: Path,
    only: str | None = None,
    commit: str | None = None,
    device: str = "cuda",
) -> None:
    """Runs every step, or those with `only` in their titles and what they need, and writes the page after each."""
    commit = commit or _commit()

    def run_step(step: Step) -> None:
        report.run(step)
        output.write_text(page(report.outcomes, report.machine, commit, TITLES[device]))

    report.machine = gpu_findings()
    gpu = find_gpu()
    for step in setup_steps(gpu) if device == "cuda" else ():
        run_step(step)
    report.machine = examine()  # once, when all is there that there will be
    report.end = time.monotonic() + report.seconds
    for step in chosen(list(steps(work, gpu, device)), only):
        run_step(step)


def chosen(every: Sequence[Step], only: str | None) -> list[Step]:
    """The steps that have `only` in their titles, and those that they come after; all of them for None."""
    if only is None:
        return list(every)
    wanted = {step.title for step in every if only.lower() in step.title.lower()}
    if not wanted:
        raise click.UsageError(
            f"--only: expected part of a step's title, found {only!r}: {'; '.join(s.title for s in every)}"
        )
    while before := {title for s in every if s.title in wanted for title in s.after} - wanted:
        wanted |= before
    return [step for step in every if step.title in wanted]


def examine() -> list[MachineFinding]:
    """What doctor finds, in a process of its own: this one has loaded the module that was compiled before."""
    source = "import dflash_trt.cli.doctor_machine as m, msgspec; print(msgspec.json.encode(m.examine()).decode())"
    status, output = run((*PYTHON, "-c", source), 180)
    try:
        return msgspec.json.decode(output.splitlines()[-1], type=list[MachineFinding])
    except (IndexError, msgspec.DecodeError):  # the last line of what ended it, in the place of findings
        problem = (output.splitlines() or [f"exit status {status}"])[-1]
        return [MachineFinding(name=f"doctor ({problem})", found=None), *gpu_findings()]


def name_of(finding: MachineFinding) -> str:
    """What doctor calls it, without the reason that it adds to what is missing."""
    return finding.name.partition(" (")[0]


def run(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> tuple[int | None, str]:
    """Exit status, None where the time ran out, and what was printed; nothing of the command outlives it."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=REPOSITORY,
            env={**os.environ, "COLUMNS": "160", "NO_COLOR": "1", **(environment or {})}, start_new_session=True,
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


def page(outcomes: Sequence[Outcome], machine: Sequence[MachineFinding], commit: str, where: str) -> str:
    """The report as Markdown."""
    counts = {result: sum(outcome.result == result for outcome in outcomes) for result in (PASSED, FAILED, LACKED)}
    summary = ", ".join(f"{count} {result.strip('*')}" for result, count in counts.items())
    lines = [f"# dflash-trt {__version__} {where}", "", f"Commit {commit}. {summary}.", "", "## Machine", ""]
    lines += _table(("what", "found"), [(name_of(finding), _found(finding)) for finding in machine])
    lines += ["", "## Steps", ""]
    rows = [(o.step.title, o.result, f"{o.seconds:.0f}" if o.seconds else "", "; ".join(o.why)) for o in outcomes]
    lines += _table(("step", "result", "seconds", "what it lacked, or what went wrong"), rows)
    lacked = {why for outcome in outcomes if outcome.result == LACKED for why in outcome.why}
    fixes = {name_of(finding): finding.fix for finding in machine} | {TORCH: TORCH_FIX, NETWORK: NETWORK_FIX}
    if listed := [f"* {name}: {fix}" for name, fix in fixes.items() if name in lacked]:
        lines += ["", "To get what was lacking, then run `make gpu-report` again:", "", *listed]
    for outcome in outcomes:
        if outcome.result != LACKED:
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
@click.option("--only", metavar="NAME", help="Run the steps with NAME in their titles, and what they build on.")
@click.option(
    "--seconds",
    type=click.IntRange(min=1),
    default=SECONDS,
    show_default=True,
    help="Begin no step later than this after the setup; the first ones tell most.",
)
@click.option("--commit", help="The commit that this tree is of, where git is not at hand.")
@click.option("--rehearse", is_flag=True, help="On a CPU: install nothing, and run what can be run there, small.")
def main(output: Path, only: str | None, seconds: int, commit: str | None, rehearse: bool) -> None:
    """Run every step and write the page; exits with 0 whatever the steps say, because the page says it."""
    with tempfile.TemporaryDirectory() as work:
        make_report(Report(seconds), Path(work), output, only, commit, "cpu" if rehearse else "cuda")
    click.echo(output)


if __name__ == "__main__":
    main()
