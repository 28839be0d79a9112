# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt verify` on a trained pair: what it prints, what it draws, and when it exits with 1."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from dflash_trt.api.completion import Completion
from dflash_trt.errors import EngineError, RequestError, VerificationError
from dflash_trt.runtime.measure.verification_report import VerificationReport
from dflash_trt.runtime.session import Session
from tests.cli.commands import run, run_here
from tests.damage import copy_scaled
from tests.engines import build
from tests.fixtures_data import without_template
from tests.paths import FIXTURES

NAME = "tiny-gpt-oss"
TARGET = FIXTURES / NAME
NUM_PROMPTS, TOKENS = 5, 40


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`engine`, `damaged` (every o_proj zeroed) and prompts.jsonl."""
    path = tmp_path_factory.mktemp("verify")
    draft = FIXTURES / f"{NAME}-dflash"
    build(draft, path / "engine", TARGET)
    copy_scaled(draft, path / "damaged-draft", "o_proj.weight", 0)
    build(path / "damaged-draft", path / "damaged", TARGET)
    lines = (FIXTURES / "prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    (path / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path


def verify(place: Path, engine: str, *options: object) -> None:
    arguments = ("--target", TARGET, "--prompts", place / "prompts.jsonl", "--max-tokens", TOKENS)
    run_here("verify", place / engine, *arguments, *options)


def too_late(*_: object, **__: object) -> None:
    raise AssertionError("the target was loaded")


@pytest.mark.parametrize(("prompt", "options"), [('""', ()), ('"text"', ("--chat",))])
def test_prompts_are_checked_before_the_target_is_loaded(
    prompt: str, options: tuple[str, ...], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.runtime.session.load_model", too_late)
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt": {prompt}}}')
    target = without_template(TARGET.name, tmp_path)
    arguments = ("--target", target, "--prompts", tmp_path / "prompts.jsonl", *options)
    with pytest.raises(RequestError, match="expected"):
        run_here("verify", place / "engine", *arguments)


def test_a_damaged_drafter_trips_the_gate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole report is printed and drawn before the verdict."""
    plot = place / "damaged.png"
    with pytest.raises(
        VerificationError, match=r"tau loss: expected at most 3\.00%, found a mean of \d\d\.\d\d%"
    ) as error:
        verify(place, "damaged", "--reference", place / "engine", "--max-tau-loss", "3%", "--json", "--plot", plot)
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    check_schema(document)
    assert document["passed"] is False
    assert document["max_tau_loss"] == 0.03
    assert document["engine"]["identical"] is True, "a bad drafter costs steps, never tokens"
    loss = document["comparison"]["tau_loss"]
    assert loss["loss"] == 1 - document["engine"]["tau"] / document["reference"]["tau"]
    assert 0.1 < loss["low"] <= loss["loss"] <= loss["high"] < 1
    assert f"({loss['low']:.2%} to {loss['high']:.2%})" in error.value.message
    errors = document["comparison"]["error"]
    assert [layer["layer"] for layer in errors["layers"]] == [0, 1]
    assert all(layer["k"] == layer["v"] == 0 for layer in errors["layers"]), "context rows know no o_proj"
    assert errors["hidden"] > 0.1
    assert f"warning: intervals mean little below 20 prompts, found {NUM_PROMPTS}" in captured.err
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")


def check_schema(document: dict[str, Any]) -> None:
    """Exactly the documented keys, of the documented types."""
    assert document.pop("schema") == "dflash-trt/verify/1"
    assert document.keys() == {"passed", "max_tau_loss", *VerificationReport.__struct_fields__}
    facts = {name: document[name] for name in VerificationReport.__struct_fields__}
    assert msgspec.to_builtins(msgspec.convert(facts, VerificationReport)) == facts
    prompts = document["engine"]["prompts"]
    names = [json.loads(line)["id"] for line in (FIXTURES / "prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]]
    assert [prompt["name"] for prompt in prompts] == names
    assert [prompt["name"] for prompt in document["comparison"]["tau_differences"]] == names
    assert {entry["position"] for entry in document["engine"]["acceptance"]} == set(range(1, document["block_size"]))


def test_tables(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    verify(place, "engine", "--reference", place / "engine", "--max-tau-loss", "0")
    output = capsys.readouterr().out
    assert output.startswith("identical to plain greedy decoding")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    table = {row[0]: row[1:] for row in rows}
    assert table["prompts identical"] == [f"{NUM_PROMPTS} of {NUM_PROMPTS}"] * 2
    assert table["quantised"] == ["no", "no"]
    assert table["tau loss"][0] == "0.00% (0.00% to 0.00%)"
    assert table["final norm"][0] == "0.00%"


def test_an_engine_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = place / "alone.png"
    verify(place, "engine", "--json", "--plot", plot)
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["passed"] is True
    assert (document["reference"], document["comparison"], document["max_tau_loss"]) == (None, None, None)
    assert "warning" not in captured.err
    assert plot.is_file()


def test_a_target_in_bfloat16(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The type reaches the model, and a difference says in which it was found."""
    verify(place, "engine", "--dtype", "bfloat16", "--max-tokens", 8, "--json")
    document = json.loads(capsys.readouterr().out)
    assert (document["passed"], document["target_dtype"]) == (True, "bfloat16")
    monkeypatch.setattr("dflash_trt.runtime.targets.packed_target.agrees", lambda _: False)
    monkeypatch.setattr(Session, "generate_plain", mistaken(Session.generate_plain))
    with pytest.raises(VerificationError, match="found others in 5 of 5 prompts") as error:
        verify(place, "engine", "--dtype", "bfloat16", "--max-tokens", 8)
    assert "a near-tie may have fallen another way, which is not the drafter's doing" in str(error.value.hint)
    assert "│ target in         │ bfloat16" in capsys.readouterr().out


def mistaken(plain: Callable[..., Completion]) -> Callable[..., Completion]:
    """Plain decoding whose sixth token is wrong."""

    def decode(*arguments: object) -> Completion:
        completion = plain(*arguments)
        return msgspec.structs.replace(completion, token_ids=[*completion.token_ids[:5], 1])

    return decode


def test_different_tokens_exit_with_1_after_the_report(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "generate_plain", mistaken(Session.generate_plain))
    with pytest.raises(VerificationError, match=r"found others in 5 of 5 prompts; the first is .* output token 5:"):
        verify(place, "engine")
    assert capsys.readouterr().out.startswith("TOKENS DIFFER from plain greedy decoding")


def test_a_differing_reference_is_refused_before_anything_is_loaded(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.runtime.session.load_model", too_late)
    draft = tmp_path / "draft"
    shutil.copytree(FIXTURES / f"{NAME}-dflash", draft)
    config = json.loads((draft / "config.json").read_text())
    config["rms_norm_eps"] = 0.001
    (draft / "config.json").write_text(json.dumps(config))
    build(draft, tmp_path / "other", TARGET)
    arguments = ("--target", TARGET, "--prompts", place / "prompts.jsonl")
    with pytest.raises(
        EngineError, match=r"other is an engine of another draft: rms_norm_eps: expected 1e-0\d, found 0.001"
    ):
        run_here("verify", place / "engine", *arguments, "--reference", tmp_path / "other")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": }\n', "prompts.jsonl:2:"),
        ('{"prompt": "a"}\n\n{"promt": "a"}\n', "prompts.jsonl:3:"),
        ('{"prompt": "a", "token_ids": [1]}\n', "prompts.jsonl:1:"),
        ('{"token_ids": ["a"]}\n', "prompts.jsonl:1:"),
        ("", "found none"),
    ],
)
def test_malformed_prompts(place: Path, tmp_path: Path, lines: str, words: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(lines)
    with pytest.raises(RequestError) as error:
        run_here("verify", place / "engine", "--target", TARGET, "--prompts", tmp_path / "prompts.jsonl")
    assert words in error.value.message
    assert "prompts.jsonl" in error.value.message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-tau-loss", "3%"], "--max-tau-loss needs --reference"),
        (["--reference", "r", "--max-tau-loss", "3"], "expected a share such as 3% or 0.03, found '3'"),
        (["--reference", "r", "--max-tau-loss", "-1%"], "expected a share such as 3% or 0.03, found '-1%'"),
        (["--reference", "r", "--max-tau-loss", "nan"], "expected a share such as 3% or 0.03, found 'nan'"),
        (["--reference", "r", "--max-tau-loss", "x"], "expected a share such as 3% or 0.03, found 'x'"),
        (["--max-tokens", "2"], "2 is not in the range x>=3"),
        (["--plot", "a.pdf"], "expected a .png file in an existing directory, found a.pdf"),
        (["--plot", "/no/such/place/a.png"], "expected a .png file in an existing directory"),
    ],
)
def test_usage(options: list[str], words: str) -> None:
    with pytest.raises(click.UsageError) as error:
        run_here("verify", "engine", "--target", "t", "--prompts", "p", *options)
    assert words in error.value.format_message()


def test_missing_matplotlib_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ("--target", "t", "--prompts", "p", "--plot", "a.png")
    result = run("verify", "engine", *options)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.endswith("error: missing package matplotlib\n\nhint: pip install 'dflash-trt[observe]'\n")
