# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt verify` on trained pairs, decoded or replayed: what it prints and draws, and when it exits with 1."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest

from dflash_trt.api.completion import Completion
from dflash_trt.errors import CheckpointError, RequestError, VerificationError
from dflash_trt.runtime.measure.replay import ReplayReport
from dflash_trt.runtime.measure.verification import TokenPrompt, Verification
from dflash_trt.runtime.measure.verification_report import VerificationReport
from dflash_trt.runtime.session import Session
from tests.cli.commands import run, run_here
from tests.damage import copy_scaled
from tests.engines import build
from tests.fixtures_data import without_template
from tests.paths import FIXTURES
from tests.runtime.measure.feature_samples import Facts, Tensors, capture, edit

NAME = "tiny-gpt-oss"
TARGET = FIXTURES / NAME
NUM_PROMPTS, TOKENS = 3, 32


def build_both(name: str, path: Path) -> Path:
    """`engine` of a trained pair, and `damaged`, every o_proj zeroed."""
    draft = FIXTURES / f"{name}-dflash"
    build(draft, path / "engine", FIXTURES / name)
    copy_scaled(draft, path / "damaged-draft", "o_proj.weight", 0)
    build(path / "damaged-draft", path / "damaged", FIXTURES / name)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both engines and prompts.jsonl."""
    path = build_both(NAME, tmp_path_factory.mktemp("verify"))
    lines = (FIXTURES / "prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]
    (path / "prompts.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return path


FEW = ("--max-tokens", 8)
"""Enough where texts are looked at, and no figure."""


def verify(place: Path, engine: str, *options: object) -> None:
    arguments = ("--target", TARGET, "--prompts", place / "prompts.jsonl", "--max-tokens", TOKENS)
    run_here("verify", place / engine, *arguments, *options)


def too_late(*_: object, **__: object) -> None:
    raise AssertionError("the target was loaded")


@pytest.mark.parametrize(("prompt", "options"), [('""', ()), ('"text"', ("--chat",))])
def test_prompts_are_checked_before_the_target_is_loaded(
    prompt: str, options: tuple[str, ...], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_trt.runtime.load.load_model", too_late)
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
    check_report(document, VerificationReport)
    names = [json.loads(line)["id"] for line in (FIXTURES / "prompts.jsonl").read_text().splitlines()[:NUM_PROMPTS]]
    assert [prompt["name"] for prompt in document["engine"]["prompts"]] == names
    assert [prompt["name"] for prompt in document["comparison"]["tau_differences"]] == names
    assert {entry["position"] for entry in document["engine"]["acceptance"]} == set(range(1, document["block_size"]))
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


def check_report(document: dict[str, Any], report: type[VerificationReport | ReplayReport]) -> None:
    """Exactly the documented keys, of the documented types."""
    assert document.pop("schema") == "dflash-trt/verify/1"
    facts = {name: document[name] for name in report.__struct_fields__}
    assert document.keys() == {"passed", "max_tau_loss", *facts}
    assert msgspec.to_builtins(msgspec.convert(facts, report)) == facts


def cells(output: str) -> dict[str, list[str]]:
    """Rows of a printed table by their first cell."""
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if "│" in line]
    return {row[0]: row[1:] for row in rows}


def test_tables(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    verify(place, "engine", "--reference", place / "engine", "--max-tau-loss", "0", *FEW)
    output = capsys.readouterr().out
    assert output.startswith("identical to plain greedy decoding")
    table = cells(output)
    assert table["prompts identical"] == [f"{NUM_PROMPTS} of {NUM_PROMPTS}"] * 2
    assert table["quantised"] == ["no", "no"]
    assert table["tau loss"][0] == "0.00% (0.00% to 0.00%)"
    assert table["final norm"][0] == "0.00%"


def test_an_engine_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify(place, "engine", "--json")
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["passed"] is True
    assert (document["reference"], document["comparison"], document["max_tau_loss"]) == (None, None, None)
    assert "warning" not in captured.err
    tau = document["engine"]["tau"]
    computed = "target: gpt_oss in float32 on cpu: all requests in one pass, C++ attention, paged cache"
    assert computed in captured.err.splitlines()
    verdict, following = captured.err.splitlines()[-2:]
    assert (
        verdict
        == f"verdict: the tokens of plain decoding; tau {tau:.2f} in {document['engine']['steps']} verify passes"
    )
    assert following == f"next: dflash-trt serve {place / 'engine'}"


def test_lossless_is_not_all(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter of no use fails without a gate; one of little use is not sent on to serve."""
    monkeypatch.setattr("dflash_trt.runtime.measure.verification_verdict.NEAR_ZERO_TAU", 9)
    with pytest.raises(VerificationError, match=r"acceptance length .* is below 9: nearly every draft"):
        verify(place, "damaged", "--json", *FEW)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["passed"] is False
    assert "next: " not in captured.err
    monkeypatch.undo()
    monkeypatch.setattr(import_module("dflash_trt.cli.verify"), "POOREST_TAU", 9)
    verify(place, "engine", *FEW)
    verdict, following = capsys.readouterr().err.splitlines()[-2:]
    assert verdict.endswith("below the lowest published for DFlash (9)")
    assert "serve" not in following


def test_a_target_in_bfloat16(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The type reaches the model, and a difference says in which it was found."""
    verify(place, "engine", "--dtype", "bfloat16", *FEW, "--json")
    document = json.loads(capsys.readouterr().out)
    assert (document["passed"], document["target_dtype"]) == (True, "bfloat16")
    monkeypatch.setattr("dflash_trt.runtime.targets.packed_target.agrees", lambda _: False)
    monkeypatch.setattr(Session, "generate_plain", mistaken(Session.generate_plain))
    with pytest.raises(VerificationError, match="3 of 3 prompts differ") as error:
        verify(place, "engine", "--dtype", "bfloat16", *FEW)
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
    with pytest.raises(VerificationError, match=r"3 of 3 prompts differ .*; the first is .* output token 5:"):
        verify(place, "engine", *FEW)
    assert capsys.readouterr().out.startswith("TOKENS DIFFER from plain greedy decoding")


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


REPLAYED = "tiny-qwen3"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`engine`, and `damaged`: every o_proj zeroed."""
    return build_both(REPLAYED, tmp_path_factory.mktemp("verify-features"))


def label(_: Tensors, facts: Facts) -> None:
    """Two prompts of category a, one of them German, and one of b."""
    prompts = facts["prompts"]
    for prompt, category, language in zip(prompts, "aba", ("de", None, None), strict=True):
        prompt |= {"category": category, "language": language}


@pytest.fixture(scope="module")
def labelled(features: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return edit(features[REPLAYED], tmp_path_factory.mktemp("labelled") / "f.safetensors", label)


def replay(engine: Path, features: Path, *options: object) -> None:
    run_here("verify", engine, "--features", features, *options)


def replayed(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The printed document, its keys and types checked."""
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    check_report(printed, ReplayReport)
    return printed


@pytest.mark.full
def test_the_figures_are_those_of_decoding(
    engines: Path, labelled: Path, sessions: dict[str, Session], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(VerificationError, match=r"tau loss: expected at most 3\.00%, found a mean of \d\d\.\d\d%"):
        replay(engines / "damaged", labelled, "--reference", engines / "engine", "--max-tau-loss", "3e-2", "--json")
    found = replayed(capsys)
    lines = [json.loads(line) for line in (FIXTURES / "prompts.jsonl").read_text().splitlines()[:3]]
    prompts = [
        TokenPrompt(name=line["id"], token_ids=sessions[REPLAYED].tokenizer(line["prompt"])["input_ids"])
        for line in lines
    ]
    live = Verification(sessions[REPLAYED]).run(prompts, 40).engine
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


def test_a_replay_of_an_engine_alone(
    engines: Path, features: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    replay(engines / "engine", features[REPLAYED], "--json")
    found = replayed(capsys)
    assert (found["reference"], found["comparison"], found["by_category"]) == (None, None, [])
    assert found["engine"]["tau_interval"]["low"] < found["engine"]["tau"] < found["engine"]["tau_interval"]["high"]


def test_a_replay_in_torch(engines: Path, features: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Decodes in BF16, as a GPU would, with nearly the same number of steps."""
    taus = []
    for executor in ("torch", "onnxruntime"):
        replay(engines / "engine", features[REPLAYED], "--executor", executor, "--device", "cpu", "--json")
        taus.append(replayed(capsys)["engine"]["tau"])
    assert taus[0] == pytest.approx(taus[1], rel=0.05)


def test_tables_of_a_replay(
    engines: Path, labelled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    replay(engines / "engine", labelled, "--reference", engines / "engine")
    captured = capsys.readouterr()
    table = cells(captured.out)
    assert captured.out.startswith("3 captured answers, replayed")
    assert table["tau loss"][0] == "0.00% (0.00% to 0.00%)"
    assert table["tau"][0] == table["tau"][1]
    assert (table["a"][0], table["b"][0], table["de"][0]) == ("2", "1", "1")
    assert "warning: intervals mean little below 20 prompts, found 3" in captured.err


def test_answers_without_room_for_a_draft(engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing proposed is nothing measured, for `search`, too; its journal does not refuse better answers."""
    file = capture(REPLAYED, tmp_path / "f.safetensors", "--max-prompts", 4, "--max-tokens", 2)
    capsys.readouterr()
    unmeasured = pytest.raises(VerificationError, match="tau: not measured, no verify pass had a draft")
    for options in ((), ("--reference", engines / "engine", "--max-tau-loss", "1%")):
        with unmeasured:
            replay(engines / "engine", file, "--json", *options)
        found = replayed(capsys)
        assert (found["passed"], found["engine"]["tau"], found["engine"]["steps"]) == (False, None, 4)
    draft, recipe = FIXTURES / f"{REPLAYED}-dflash", tmp_path / "own.yaml"
    with unmeasured:
        run_here("search", draft, "--features", file, "--max-tau-loss", "1%", "-o", recipe)
    assert list(tmp_path.iterdir()) == [file]


def test_sampled_answers(engines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-prompts", 2, "--max-tokens", 16, "--temperature", 0.5)
    file = capture(REPLAYED, tmp_path / "f.safetensors", *options)
    capsys.readouterr()
    with pytest.raises(VerificationError, match=r"nearly every draft token is rejected|no verify pass had"):
        replay(engines / "damaged", file, "--reference", engines / "engine", "--json")
    found = replayed(capsys)
    assert found["text_temperature"] == 0.5
    assert 1 <= found["engine"]["tau"] < found["reference"]["tau"]
    replay(engines / "engine", file)
    assert "2 captured answers sampled at temperature 0.5, replayed" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "options",
    [
        ("--target", "x"),
        ("--prompts", "x"),
        ("--chat",),
        ("--no-thinking",),
        ("--chat-template-kwargs", "{}"),
        ("--max-tokens", 9),
        ("--plot", "x.png"),
    ],
)
def test_what_needs_the_target_is_no_option_beside_features(options: tuple[object, ...]) -> None:
    with pytest.raises(click.UsageError, match=f"{options[0]} cannot be used with --features"):
        replay(Path("engine"), Path("features"), *options)


def test_one_of_both_is_needed() -> None:
    with pytest.raises(click.UsageError, match="expected --prompts or --features"):
        run_here("verify", "engine", "--target", "x")


def test_features_of_another_target(engines: Path, features: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"another target .*: model_type: expected qwen3, found gpt_oss"):
        replay(engines / "engine", features["tiny-gpt-oss"])
