# SPDX-License-Identifier: Apache-2.0
"""The report of a GPU keeps what each step printed, whatever becomes of the step, and what earlier runs found."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.gpu_report import FAILED, LACKED, PASSED, Report, chosen
from benchmarks.gpu_report_steps import Step, steps

STEPS = [
    Step("sound", "sh -c 'echo a figure'", 20),
    Step("hanging", "sh -c 'echo a figure; sleep 60'", 1),
    Step("crashing", "sh -c 'echo a figure; kill -ABRT $$'", 20),
    Step("late", "sh -c 'echo a figure'", 60),
]


def report(page: Path, commit: str = "abc") -> Report:
    made = Report(page.parent, page, commit, "cpu", ())
    made.end = time.monotonic() + 15
    return made


def test_a_step_that_hangs_or_crashes_loses_only_itself(tmp_path: Path) -> None:
    first = report(tmp_path / "page.md")
    outcomes = [first.run(step) for step in STEPS]
    assert [outcome.result for outcome in outcomes] == [PASSED, FAILED, FAILED, LACKED]
    assert [outcome.why for outcome in outcomes] == [[], ["took more than 1 s"], ["ended by SIGABRT"], ["time"]]
    text = (tmp_path / "page.md").read_text()
    assert text.count("\n    a figure\n") == 3
    second = report(tmp_path / "page.md")
    left = chosen(STEPS, (), second.passed_before)
    assert [step.title for step in left] == ["hanging", "crashing", "late"]
    assert not report(tmp_path / "page.md", "def").passed_before
    second.end += 60
    second.run(STEPS[3])
    assert report(tmp_path / "page.md").passed_before == {"sound", "late"}
    assert (tmp_path / "page.md").read_text().count("\n    a figure\n") == 4


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_step_has_what_it_comes_after_before_it(device: str) -> None:
    done: set[str] = set()
    for step in steps("9.0", device):
        assert done.issuperset(step.after)
        done.add(step.title)
