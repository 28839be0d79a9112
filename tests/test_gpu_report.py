# SPDX-License-Identifier: Apache-2.0
"""The GPU report: its page, and all of its steps on a GPU that stands in for one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from click.testing import CliRunner
from torch import Tensor

from benchmarks import gpu_report, gpu_steps
from benchmarks.gpu_report import FAILED, LACKED, PASSED, Gpu, Outcome, Report, Step, make_report, page, run
from dflash_trt.cli import cli
from dflash_trt.cli.doctor_machine import MachineFinding
from dflash_trt.engine.executor import DraftInputs
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.plans.machine import Gpu as DriverGpu
from dflash_trt.runtime.drafter.onnx_executor import OnnxExecutor
from tests.contract.launcher import HostLauncher
from tests.contract.machine import B300, H200, pretend
from tests.contract.recorder import VERSIONS
from tests.engines import build
from tests.reference.synthetic import DraftSizes

MISSING = MachineFinding(name="NVIDIA GPU (no driver)", found=None, fix="run this on the GPU machine")


def python(source: str) -> tuple[str, ...]:
    return (sys.executable, "-c", source)


def outcomes(*steps: Step, seconds: float = 600) -> dict[str, Outcome]:
    report = Report()
    report.end = time.monotonic() + seconds
    report.machine = [MISSING]
    return {step.title: report.run(step) for step in steps}


def test_one_step_keeps_no_other_from_running() -> None:
    found = outcomes(
        Step("breaks", python("print('half'); raise SystemExit(3)"), 60),
        Step("builds on it", python("print('never')"), 60, (), "breaks"),
        Step("hangs", python("import time; print('begun', flush=True); time.sleep(60)"), 1),
        Step("needs a GPU", python("print('never')"), 60, ("NVIDIA GPU",)),
        Step("needs FP4", python("print('never')"), 60, lacks="a GPU of SM 10.0"),
        Step("is no program", ("/no/such/program",), 60),
        Step("works", python("import os; print(os.environ['WHERE'])"), 60, environment={"WHERE": "here"}),
    )
    expected = [FAILED, LACKED, FAILED, LACKED, LACKED, FAILED, PASSED]
    assert [outcome.result for outcome in found.values()] == expected
    assert (found["breaks"].output, found["breaks"].why) == ("half\n", ["exit status 3"])
    assert found["builds on it"].why == ["“breaks”"]
    assert (found["hangs"].output, found["hangs"].why) == ("begun\n", ["took more than 1 s"])
    assert found["works"].output == "here\n"
    text = page(list(found.values()), [MISSING], "abc")
    assert "Commit abc. 1 passed, 3 failed, 3 lacked." in text
    assert "| NVIDIA GPU | missing: no driver |" in text
    assert "| needs a GPU | lacked |  | NVIDIA GPU |" in text
    assert "| needs FP4 | lacked |  | a GPU of SM 10.0 |" in text
    assert "\n* NVIDIA GPU: run this on the GPU machine\n" in text
    assert "\n    half\n" in text
    assert "never" not in text


def test_when_the_time_is_over_the_rest_says_so() -> None:
    first = Step("first", python("import time; time.sleep(60)"), 60)
    found = outcomes(first, Step("second", python("print()"), 60), seconds=1.5)
    assert [outcome.result for outcome in found.values()] == [FAILED, LACKED]
    assert found["second"].why[0].startswith("time: ")


def test_the_machine_is_examined_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has loaded the module as it was before kernels were compiled, and would not find them."""
    names = {finding.name for finding in gpu_report.examine()}
    assert {"Python", "torch", "tensorrt"} <= names
    monkeypatch.setattr(gpu_report, "run", lambda command, seconds: (1, "Traceback\nOSError: no such library"))
    monkeypatch.setattr(gpu_report, "gpu_findings", list)
    assert [finding.name for finding in gpu_report.examine()] == ["doctor (OSError: no such library)"]


def test_nothing_of_a_step_outlives_it(tmp_path: Path) -> None:
    child = f"import time; time.sleep(1); open({str(tmp_path / 'late')!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run(python(parent), 0.5)[0] is None
    time.sleep(1)
    assert not (tmp_path / "late").exists()


def test_what_a_step_prints_stays_in_its_block() -> None:
    outcome = Outcome(Step("a | b", ("cmd",), 1), PASSED, output="```\n" + "\n".join(map(str, range(100))))
    text = page([outcome], [], "abc")
    assert "\n    99\n" in text
    assert "... 41 lines before these" in text
    assert "| a \\| b | passed |" in text
    assert "\n```" not in text


class Shifted(OnnxExecutor):
    """Hidden states that are off by a tenth."""

    def draft(self, inputs: DraftInputs) -> Tensor:
        return super().draft(inputs) * 1.1


@pytest.mark.parametrize(("other", "expected"), [(OnnxExecutor, 0.0), (Shifted, 0.1)])
def test_parity_measures_the_difference(
    other: Callable[..., OnnxExecutor], expected: float, draft_dir: Path, tmp_path: Path
) -> None:
    build(draft_dir, tmp_path / "engine")
    manifest = read_manifest(tmp_path / "engine")

    def found() -> Iterator[float]:
        executors = (other(tmp_path / "engine", manifest), OnnxExecutor(tmp_path / "engine", manifest))
        return gpu_steps.differences(manifest, *executors)

    assert list(found()) == pytest.approx([expected] * len(gpu_steps.STEPS), abs=1e-5)


GEMM = {
    "Name": "__myl_Fc_0x1", "Metadata": "[ONNX Layer: layers.0.self_attn/Gemm]", "TacticName": "sm90_xmma_gemm",
    "Inputs": [{"Name": "x", "Format/Datatype": "Row major linear BF16"}],
    "Outputs": [{"Name": "y", "Format/Datatype": "Row major linear FP8"}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "is_quantized", "is_lost"),
    [
        ({}, False, False),
        ({}, True, True),  # its output alone is FP8
        ({"TacticName": "sm90_xmma_gemm_e4m3bf16_e4m3f32"}, True, False),
        ({"Inputs": [{"Name": "x", "Format/Datatype": "Row major linear FP8"}]}, True, False),
        ({"Name": "layers.0.self_attn/DequantizeLinear_1", "Metadata": "", "TacticName": "e4m3"}, True, True),
    ],
)
def test_a_recipe_whose_weights_are_dequantised_first(
    change: dict[str, Any], is_quantized: bool, is_lost: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (gpu_steps.gemms([GEMM | change, {"Name": "Reformat"}], is_quantized) is not None) == is_lost
    assert "2 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("capability", "compiled"), [("9.0", "90a"), ("10.3", "103a"), ("12.0", "120a"), ("8.9", None)]
)
def test_kernels_are_compiled_for_the_gpu_at_hand(
    capability: str, compiled: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_report, "find_nvcc", lambda: "/wheels/bin/nvcc")
    step = gpu_report.compile_kernels(Gpu(capability, 13))
    if compiled is None:
        assert step.lacks == "a GPU of SM 9.0 or newer for the kernels; this one is of SM 8.9"
    else:
        assert step.command[-1] == f"cmake.define.DFLASH_CUDA_ARCHITECTURES={compiled}"
        assert (step.lacks, step.environment) == (None, {"CUDACXX": "/wheels/bin/nvcc", "LIBRARY_PATH": "/wheels/lib"})


@pytest.mark.parametrize(
    ("cuda", "wheels"), [(13, ["tensorrt-cu13", "nvidia-cuda-nvcc"]), (12, ["tensorrt-cu12", "nvidia-cuda-nvcc-cu12"])]
)
def test_a_bare_machine_gets_what_its_driver_runs(
    cuda: int, wheels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_report, "find_nvcc", lambda: None)
    monkeypatch.setattr(gpu_report, "package_version", lambda name: None)
    steps = list(gpu_report.setup_steps(Gpu("9.0", cuda)))
    installed = [step.command[4] for step in steps if step.title.endswith(", installed")]
    assert [name.partition(">")[0].partition("=")[0] for name in installed] == wheels
    assert steps[-1].lacks is not None, "its wheel brought none"


def nvml(monkeypatch: pytest.MonkeyPatch, gpu: DriverGpu, cuda: int) -> None:
    """What NVML says on such a machine."""
    capability = tuple(map(int, gpu.compute_capability.split(".")))
    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: cuda,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: gpu.name,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: capability,
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=139 * 2**30),
    }.items():
        monkeypatch.setattr(pynvml, name, value)


class StandIn:
    """Runs steps in this process, on the recorded TensorRT; what only a GPU can do is taken as done."""

    def __init__(self, broken: str | None) -> None:
        self._broken = broken
        self.commands: list[Sequence[str]] = []

    def __call__(
        self, command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None
    ) -> tuple[int | None, str]:
        self.commands.append(command)
        if self._broken is not None and self._broken in command:
            return 1, "planted"
        if tuple(command[:2]) == gpu_report.OURS and command[2] != "torch-cuda":
            group, words = gpu_steps.steps, [*command[2:], *(["cpu"] if command[2] == "decode" else [])]
        elif tuple(command[:3]) == gpu_report.CLI:
            group, words = cli, list(command[3:])
        else:
            return 0, "done"
        result = CliRunner().invoke(group, list(words), catch_exceptions=True)
        return result.exit_code, f"{result.output}\n{result.exception or ''}"


Make = Callable[..., tuple[Report, StandIn, str]]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The report of a machine with that GPU."""

    def make(gpu: DriverGpu, broken: str | None = None, cuda: int = 13000) -> tuple[Report, StandIn, str]:
        pretend(monkeypatch, tmp_path, VERSIONS[-1], gpu)
        nvml(monkeypatch, gpu, cuda)
        runner = StandIn(broken)
        monkeypatch.setattr(gpu_report, "run", runner)
        monkeypatch.setattr(gpu_report, "find_nvcc", lambda: "/usr/local/cuda/bin/nvcc")
        monkeypatch.setattr(gpu_report, "package_version", lambda name: VERSIONS[-1])
        here = [MachineFinding(name=name, found="here") for name in ("tensorrt", "tensorrt_llm", "plugin library")]
        monkeypatch.setattr(gpu_report, "examine", lambda: here)
        for launcher in ("own_stream", "current_stream"):
            monkeypatch.setattr(gpu_steps, launcher, HostLauncher)
        monkeypatch.setattr(
            gpu_steps, "SIZES", DraftSizes(hidden=64, intermediate=128, num_heads=8, head_dim=64, num_taps=2)
        )
        monkeypatch.setattr(gpu_report, "FAR_ROWS", 256)
        monkeypatch.setattr(gpu_steps, "FAR", 2**10)
        monkeypatch.setattr(gpu_steps, "RUNS", 1)
        monkeypatch.setattr(gpu_steps, "_predicted", lambda draft, context: "estimate says 10 us")
        report, output = Report(), tmp_path / "report.md"
        make_report(report, tmp_path / "work", output)
        return report, runner, output.read_text()

    return make


def by_title(report: Report, result: str) -> dict[str, str]:
    return {o.step.title: "; ".join([*o.why, o.output]) for o in report.outcomes if o.result == result}


def test_every_step_on_a_stand_in(stand_in: Make) -> None:
    """An H200: every step passes but those of FP4 recipes, which name what they lack."""
    report, _, text = stand_in(H200)
    assert by_title(report, FAILED) == {}
    lacked = by_title(report, LACKED)
    assert len(lacked) == 4
    for title, why in lacked.items():
        assert "nvfp4" in title
        assert "NVFP4: expected a GPU of SM 10.0 or newer, found SM 9.0" in why
    for words in ("with a Gemm read FP8 or FP4", "tau ", "estimate says", "x 2^31 elements", "were captured"):
        assert words in text


@pytest.mark.full
def test_a_failure_ends_nothing(stand_in: Make) -> None:
    """A B300, on which building plans fails: what needs them lacks them, all other recipes pass."""
    report, _, text = stand_in(B300, broken="--plans-for")
    assert set(by_title(report, FAILED)) == {f"{pair}: plans" for pair in gpu_report.PAIRS}
    assert set(by_title(report, LACKED).values()) == {f"“{pair}: plans”; " for pair in gpu_report.PAIRS}
    assert "planted" in text
    assert sum("gpt-oss-120b's drafter" in title for title in by_title(report, PASSED)) == 1 + len(gpu_report.RECIPES)


def test_every_step_says_what_it_lacks_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "gpu_findings", lambda: [MISSING])
    monkeypatch.setattr(gpu_report, "examine", lambda: [MISSING])
    monkeypatch.setattr(gpu_report, "find_nvcc", lambda: None)
    monkeypatch.setattr(gpu_report, "package_version", lambda name: None)
    monkeypatch.setattr(gpu_report, "run", lambda *arguments: (0, "done"))
    report, output = Report(), tmp_path / "report.md"
    make_report(report, tmp_path, output)
    assert by_title(report, FAILED) == {}
    expected = {*(f"{pair}: engine" for pair in gpu_report.PAIRS), "TensorRT-LLM's contract"}
    assert set(by_title(report, PASSED)) == expected
    assert all("NVIDIA GPU" in why for why in by_title(report, LACKED).values())
    assert "run this on the GPU machine" in output.read_text()
