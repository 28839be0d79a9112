# SPDX-License-Identifier: Apache-2.0
"""The GPU report's page: what a step lacks, what failed, what took too long, and what runs all the same."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks import gpu_report, gpu_steps
from benchmarks.gpu_report import DONE, FAILED, SKIPPED, Outcome, Step, page, run, run_steps, steps
from dflash_trt.doctor.status import MachineFinding
from dflash_trt.drafter.executor import DraftInputs
from dflash_trt.drafter.onnx_executor import OnnxExecutor
from dflash_trt.engine.manifest import read_manifest
from tests.engines import build

MISSING = MachineFinding(name="NVIDIA GPU (no driver)", found=None, fix="run this on the GPU machine")


def python(source: str) -> tuple[str, ...]:
    return (sys.executable, "-c", source)


def outcomes(monkeypatch: pytest.MonkeyPatch, *given: Step, seconds: float = 600) -> dict[str, Outcome]:
    monkeypatch.setattr(gpu_report, "steps", lambda work: iter(given))
    monkeypatch.setattr(gpu_report, "examine", lambda: [MISSING])
    return {outcome.step.title: outcome for outcome in run_steps(Path(), seconds)}


def test_one_step_keeps_no_other_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(
        monkeypatch,
        Step("breaks", python("print('half'); raise SystemExit(3)"), 60),
        Step("builds on it", python("print('never')"), 60, (), "breaks"),
        Step("hangs", python("import time; print('begun', flush=True); time.sleep(60)"), 1),
        Step("needs a GPU", python("print('never')"), 60, ("NVIDIA GPU",)),
        Step("works", python("print('here')"), 60),
    )
    assert [outcome.result for outcome in found.values()] == [FAILED, SKIPPED, FAILED, SKIPPED, DONE]
    assert (found["breaks"].output, found["breaks"].why) == ("half\n", ["exit status 3"])
    assert found["builds on it"].why == ["needs “breaks”"]
    assert (found["hangs"].output, found["hangs"].why) == ("begun\n", ["took more than 1 s"])
    assert found["needs a GPU"].why == ["lacks NVIDIA GPU"]
    text = page(list(found.values()), [MISSING], "abc")
    assert "Commit abc. 1 done, 2 failed, 2 not run." in text
    assert "| NVIDIA GPU | missing: no driver |" in text
    assert "| needs a GPU | not run |  | lacks NVIDIA GPU |" in text
    assert "\n* NVIDIA GPU: run this on the GPU machine\n" in text
    assert "\n    half\n" in text
    assert "never" not in text


def test_when_the_time_is_over_the_rest_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Step("first", python("import time; time.sleep(60)"), 60)
    found = outcomes(monkeypatch, first, Step("second", python("print()"), 60), seconds=1.5)
    assert found["first"].result == FAILED
    assert found["second"].result == SKIPPED
    assert "are over" in found["second"].why[0]


def test_nothing_of_a_step_outlives_it(tmp_path: Path) -> None:
    child = f"import time; time.sleep(1); open({str(tmp_path / 'late')!r}, 'w')"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run(python(parent), 1)[0] is None
    time.sleep(1.2)
    assert not (tmp_path / "late").exists()


def test_the_steps_fit_together(tmp_path: Path) -> None:
    listed = list(steps(tmp_path))
    titles = [step.title for step in listed]
    assert len(set(titles)) == len(titles)
    assert all(step.after is None or step.after in titles[: titles.index(step.title)] for step in listed)
    assert any("gpt-oss-120b" in title for title in titles)


def test_what_a_step_prints_stays_in_its_block() -> None:
    outcome = Outcome(Step("a | b", ("cmd",), 1), DONE, output="```\n" + "\n".join(map(str, range(100))))
    text = page([outcome], [], "abc")
    assert "\n    99\n" in text
    assert "... 41 lines before these" in text
    assert "| a \\| b | done |" in text
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
