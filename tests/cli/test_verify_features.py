# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt verify --features`: the same figures as with the target, by category and language, and the gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from dflash_trt.errors import CheckpointError, VerificationError
from dflash_trt.runtime.measure.replay import ReplayReport
from dflash_trt.runtime.measure.verification import TokenPrompt, Verification
from dflash_trt.runtime.session import Session
from tests.cli.commands import run_here
from tests.damage import copy_scaled
from tests.engines import build
from tests.paths import FIXTURES
from tests.runtime.measure.feature_samples import Facts, Tensors, capture, edit

NAME = "tiny-qwen3"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`engine`, and `damaged`: every o_proj zeroed."""
    path = tmp_path_factory.mktemp("verify-features")
    draft = FIXTURES / f"{NAME}-dflash"
    build(draft, path / "engine", FIXTURES / NAME)
    copy_scaled(draft, path / "damaged-draft", "o_proj.weight", 0)
    build(path / "damaged-draft", path / "damaged", FIXTURES / NAME)
    return path


def label(_: Tensors, facts: Facts) -> None:
    """Two prompts of category a, one of them German, and one of b."""
    prompts = facts["prompts"]
    assert isinstance(prompts, list)
    for prompt, category, language in zip(prompts, "aba", ("de", None, None), strict=True):
        prompt |= {"category": category, "language": language}


@pytest.fixture(scope="module")
def labelled(features: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edit(features[NAME], tmp_path_factory.mktemp("labelled") / "f.safetensors", label)


def verify(engine: Path, features: Path, *options: object) -> None:
    run_here("verify", engine, "--features", features, *options)


def document(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What was printed, its keys and types checked."""
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed.pop("schema") == "dflash-trt/verify/1"
    facts = {name: printed[name] for name in ReplayReport.__struct_fields__}
    assert printed.keys() == {"passed", "max_tau_loss", *facts}
    assert msgspec.to_builtins(msgspec.convert(facts, ReplayReport)) == facts
    return printed


def test_the_figures_are_those_of_decoding(
    engines: Path, labelled: Path, sessions: dict[str, Session], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(VerificationError, match=r"tau loss: expected at most 3\.00%, found a mean of \d\d\.\d\d%"):
        verify(engines / "damaged", labelled, "--reference", engines / "engine", "--max-tau-loss", "3%", "--json")
    found = document(capsys)
    lines = [json.loads(line) for line in (FIXTURES / "prompts.jsonl").read_text().splitlines()[:3]]
    prompts = [TokenPrompt(name=line["id"], token_ids=sessions[NAME].encode(line["prompt"])) for line in lines]
    live = Verification(sessions[NAME]).run(prompts, 40).engine
    reference = found["reference"]
    assert (reference["tau"], reference["steps"]) == (live.tau, live.steps)
    assert [(p["name"], p["steps"], p["tau"]) for p in reference["prompts"]] == [
        (p.name, p.steps, p.tau) for p in live.prompts
    ]
    assert reference["acceptance"] == msgspec.to_builtins(live.acceptance)
    loss = found["comparison"]["tau_loss"]
    assert loss["loss"] == 1 - found["engine"]["tau"] / reference["tau"]
    assert found["passed"] is False

    taus = [prompt["tau"] for prompt in reference["prompts"]]
    assert [(part["name"], part["reference_tau"]["mean"]) for part in found["by_category"]] == [
        ("a", (taus[0] + taus[2]) / 2),
        ("b", taus[1]),
    ]
    assert found["by_category"][1]["tau_loss"]["low"] is None, "one prompt has no interval"
    assert [part["name"] for part in found["by_language"]] == ["de", None]


def test_an_engine_alone(engines: Path, features: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    verify(engines / "engine", features[NAME], "--json")
    found = document(capsys)
    assert (found["reference"], found["comparison"], found["by_category"]) == (None, None, [])
    assert found["engine"]["tau_interval"]["low"] < found["engine"]["tau"] < found["engine"]["tau_interval"]["high"]


def test_tables(
    engines: Path, labelled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    verify(engines / "engine", labelled, "--reference", engines / "engine")
    captured = capsys.readouterr()
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in captured.out.splitlines() if "│" in line]
    table = {row[0]: row[1:] for row in rows}
    assert captured.out.startswith("3 captured answers, replayed")
    assert table["tau loss"][0] == "0.00% (0.00% to 0.00%)"
    assert table["tau"][0] == table["tau"][1]
    assert (table["a"][0], table["b"][0], table["de"][0]) == ("2", "1", "1")
    assert "warning: intervals mean little below 20 prompts, found 3" in captured.err


def test_sampled_answers(engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-prompts", 2, "--max-tokens", 16, "--temperature", 0.5)
    file = capture(NAME, tmp_path / "f.safetensors", *options)
    capsys.readouterr()
    verify(engines / "damaged", file, "--reference", engines / "engine", "--json")
    found = document(capsys)
    assert found["text_temperature"] == 0.5
    assert 1 <= found["engine"]["tau"] < found["reference"]["tau"]
    verify(engines / "damaged", file)
    assert "2 captured answers sampled at temperature 0.5, replayed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "options", [("--target", "x"), ("--prompts", "x"), ("--chat",), ("--max-tokens", 9), ("--plot", "x.png")]
)
def test_what_needs_the_target_is_no_option_beside_features(options: tuple[object, ...]) -> None:
    with pytest.raises(click.UsageError, match=f"{options[0]} cannot be used with --features"):
        verify(Path("engine"), Path("features"), *options)


def test_one_of_both_is_needed() -> None:
    with pytest.raises(click.UsageError, match="expected --prompts or --features"):
        run_here("verify", "engine", "--target", "x")


def test_features_of_another_target(engines: Path, features: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"another target .*: model_type: expected qwen3, found gpt_oss"):
        verify(engines / "engine", features["tiny-gpt-oss"])
