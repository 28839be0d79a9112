# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt doctor URL` against this server, healthy and with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dflash_trt.llm import LLM
from dflash_trt.observe.diagnosis import judge, probes
from dflash_trt.observe.diagnosis.diagnosis import Diagnosis, diagnose
from dflash_trt.observe.endpoints.client import Client
from tests.fixtures_data import without_template
from tests.observe.diagnosis import faults
from tests.runtime.server.live import serving

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.engine(tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def baseline(engine: Path) -> Diagnosis:
    return ask(engine)


def ask(engine: Path, plant: Callable[[LLM], None] | None = None, baseline: Diagnosis | None = None) -> Diagnosis:
    """Without the probe that measures time: tests share their machine.

    In completions, of which the draft was trained, not in chats.
    """
    with TemporaryDirectory() as folder:
        target = without_template(faults.TARGET.name, Path(folder))
        # Steps are compared, and `auto` makes those depend on time.
        with LLM(engine, target, max_batch_size=16, draft_length=7) as llm:
            return _asked(llm, plant, baseline)


def _asked(llm: LLM, plant: Callable[[LLM], None] | None, baseline: Diagnosis | None) -> Diagnosis:
    if plant is not None:
        plant(llm)
    with serving(llm) as live, Client(live.url) as client:
        return diagnose(client, baseline=baseline, long_tokens=1024, has_load=False, seconds=1000)


def found(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.name, finding.causes[0].name) for finding in diagnosis.findings]


def test_a_healthy_server_has_no_findings(engine: Path, baseline: Diagnosis) -> None:
    assert found(baseline) == []
    again = ask(engine, baseline=baseline)
    assert found(again) == []
    assert [len(group.samples) for group in again.groups] == [16, 6, 6, 8, 8, 8, 6, 6, 0, 0]


def test_window_ignored(tmp_path: Path, baseline: Diagnosis, monkeypatch: pytest.MonkeyPatch) -> None:
    # Passages are of this package's source, and change with it: of 8, two that accept a third of a draft hide the rest.
    monkeypatch.setattr(probes, "NUM_LONG", 24)
    sick = faults.engine(tmp_path, window=None)
    diagnosis = ask(sick, baseline=baseline)
    assert found(diagnosis) == [("acceptance collapses at long contexts", "window")]
    short, long = diagnosis.groups[0], diagnosis.groups[5]
    assert judge.long_contexts("dflash-trt", short, long, None) == diagnosis.findings  # the baseline was not needed


def test_first_k_norm_for_all_layers(tmp_path: Path, baseline: Diagnosis) -> None:
    sick = faults.engine(tmp_path, edit=faults.first_k_norm_for_all)
    assert found(ask(sick, baseline=baseline)) == [("acceptance below the baseline", "k_norm")]


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (faults.shift_taps, ("acceptance below the baseline", "taps")),
        (faults.scale_v, ("acceptance below the baseline", "scales")),
        (faults.lose_prefix_features, ("acceptance falls on a repeated prefix", "prefix")),
        (faults.ignore_temperature, ("temperature ignored", "temperature")),
    ],
)
def test_planted(plant: Callable[[LLM], None], expected: tuple[str, str], engine: Path, baseline: Diagnosis) -> None:
    assert found(ask(engine, plant, baseline)) == [expected]
