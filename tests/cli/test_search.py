# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt search` on a trained pair: a recipe that loads, the same bytes again, on after a kill."""

import shutil
from pathlib import Path

import click
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.errors import BuildError, CheckpointError, ConfigError, VerificationError
from dflash_trt.runtime.measure.features import open_features
from dflash_trt.runtime.measure.journal import Journal
from dflash_trt.runtime.measure.search.recipe_judge import Measurement, RecipeJudge, split
from dflash_trt.runtime.measure.search.search import RecipeChoice
from dflash_trt.runtime.measure.statistics import TauLoss
from tests.cli.commands import run_here
from tests.paths import FIXTURES
from tests.runtime.measure.feature_samples import Facts, Tensors, edit

NAME = "tiny-gpt-oss"
DRAFT = FIXTURES / f"{NAME}-dflash"
KINDS = ("tokens", "prompt_length", "taps", "embeddings")


def search(features: Path, output: Path, *options: object) -> None:
    arguments = ("--features", features, "--format", "fp8", "-o", output, *options)
    run_here("search", DRAFT, *arguments, *(() if "--max-tau-loss" in options else ("--max-tau-loss", "20%")))


@pytest.fixture(scope="module")
def searched(features: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe."""
    file = tmp_path_factory.mktemp("searched") / "own.yaml"
    search(features[NAME], file)
    return file


@pytest.mark.full
def test_a_searched_recipe_is_an_ordinary_one(searched: Path, tmp_path: Path) -> None:
    text = searched.read_text()
    assert text.startswith("# dflash-trt search of tiny-gpt-oss-dflash\n# searched on: tiny-gpt-oss.safete")
    assert str(searched.parent) not in text
    run_here("quantize", DRAFT, "--recipe", searched, "-o", tmp_path / "draft")
    found = read_draft(tmp_path / "draft").quantization.modules
    assert set(found.values()) == {"FP8"}
    starred = [line.split() for line in text.splitlines() if line.startswith("# *  ")]
    written = sum(tensor.num_bytes for tensor in read_draft(tmp_path / "draft").weights.values())
    assert [line[2] for line in starred] == [str(written)]
    assert [path.name for path in searched.parent.iterdir()] == ["own.yaml"], "the journal is gone"


@pytest.mark.full
def test_a_search_that_was_stopped_goes_on(
    searched: Path, features: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Same bytes as one that was not; nothing is measured twice."""
    measured: list[str] = []
    measure = Journal.measure

    def stop_after(limit: int) -> None:
        def counted(entries: Journal[Measurement], key: str, now: object) -> Measurement:
            def counting() -> Measurement:
                if len(measured) == limit:
                    raise KeyboardInterrupt
                measured.append(key)
                return now()  # type: ignore[no-any-return, operator]

            return measure(entries, key, counting)

        monkeypatch.setattr(Journal, "measure", counted)

    stop_after(9)
    with pytest.raises((KeyboardInterrupt, click.exceptions.Abort)):
        search(features[NAME], tmp_path / "own.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["own.yaml.journal"]
    assert f"interrupted: the same command continues from {tmp_path}/own.yaml.journal\n" in capsys.readouterr().err
    with pytest.raises(BuildError, match=r"own\.yaml\.journal: expected measurements of this draft"):
        search(features[NAME], tmp_path / "own.yaml", "--seed", 1)
    stop_after(100)
    search(features[NAME], tmp_path / "own.yaml")
    assert len(measured) == len(set(measured)) > 9
    assert (tmp_path / "own.yaml").read_bytes() == searched.read_bytes()


def test_bytes_that_cannot_be_met(features: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loses_half(_: object, choice: RecipeChoice, *, held_out: bool) -> TauLoss:
        return TauLoss(loss=0.5 * (set(choice.algorithms) != {"none"}), low=0, high=1, num_prompts=9)

    monkeypatch.setattr(RecipeJudge, "loss", loses_half)
    monkeypatch.setattr(RecipeJudge, "error", lambda *_: 1.0)
    with pytest.raises(VerificationError, match=r"--max-bytes: expected a checkpoint of at most 1024 bytes, found \d+"):
        search(features[NAME], tmp_path / "own.yaml", "--max-bytes", "1KiB")
    with pytest.raises(VerificationError, match="found 889344 as the smallest within --max-tau-loss") as error:
        search(features[NAME], tmp_path / "own.yaml", "--max-bytes", "0.6MB")
    assert error.value.hint is not None
    assert not (tmp_path / "own.yaml").exists()


def test_prompts_that_were_searched_on_are_not_held_out(features: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copy(features[NAME], tmp_path / "copy.safetensors")
    words = "copy.safetensors: expected prompts that are not in --features, found 3 of 3 there"
    with pytest.raises(CheckpointError, match=words) as error:
        search(features[NAME], tmp_path / "own.yaml", "--held-out", copy)
    assert "dflash-trt capture" in str(error.value.hint)
    assert [*tmp_path.iterdir()] == [copy]


def test_answers_to_one_prompt_are_not_split(features: dict[str, Path], tmp_path: Path) -> None:
    def repeat(tensors: Tensors, _: Facts) -> None:
        tensors |= {f"{kind}.2": tensors[f"{kind}.0"].clone() for kind in KINDS}

    with open_features(edit(features[NAME], tmp_path / "twice", repeat), read_draft(DRAFT).spec) as file:
        for seed in range(8):
            assert {part.numbers for part in split(file, None, seed)} == {(0, 2), (1,)}


def test_too_few_answers_to_hold_any_out(features: dict[str, Path], tmp_path: Path) -> None:
    """One, and one of a single token, which no verify pass emits."""

    def cut(tensors: Tensors, facts: Facts) -> None:
        facts["prompts"] = [{"name": "long"}, {"name": "short"}]
        length = int(tensors["prompt_length.1"])
        for kind, rows in zip(KINDS, (length + 1, None, length, 1), strict=True):
            del tensors[f"{kind}.2"]
            if rows is not None:
                tensors[f"{kind}.1"] = tensors[f"{kind}.1"][:rows].clone()

    few = edit(features[NAME], tmp_path / "few", cut)
    with pytest.raises(CheckpointError, match=r"few: expected 2 or more prompts .* 2 tokens, found 1") as error:
        search(few, tmp_path / "own.yaml")
    assert "give others as --held-out FILE, or capture more: dflash-trt capture" in str(error.value.hint)
    assert [*tmp_path.iterdir()] == [few]


def test_another_file_is_kept(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("description: by hand")
    with pytest.raises(BuildError, match="already exists and is not a recipe that this command searched"):
        search(tmp_path / "none", tmp_path / "own.yaml", "--force")


def test_the_fastest_recipe(features: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def loses_nothing(_: object, choice: RecipeChoice, *, held_out: bool) -> TauLoss:
        return TauLoss(loss=0, low=0, high=0, num_prompts=9)

    monkeypatch.setattr(RecipeJudge, "loss", loses_nothing)
    monkeypatch.setattr(RecipeJudge, "error", lambda *_: 1.0)
    options = ("--objective", "step-time", "--gpu")
    search(features[NAME], tmp_path / "its own\n.yaml", *options, "b300")
    text = (tmp_path / "its own\n.yaml").read_text()
    assert "# objective: step-time on b300, batch 8\n" in text
    assert [line.split()[:4] for line in text.splitlines() if "held out" in line and "pass" in line] == [
        ["#", "bytes", "pass", "loss"]
    ]
    with pytest.raises(ConfigError, match=r"--gpu: expected a GPU \(.*\), found 'b30'"):
        search(features[NAME], tmp_path / "other.yaml", *options, "b30")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--max-tau-loss", "1%", "--gpu", "b300"), "--objective step-time and --gpu go together"),
        ((), "Missing option '--max-tau-loss'"),
        (("--max-tau-loss", "1%", "--max-bytes", "few"), "expected bytes such as 400MiB or 4096, found 'few'"),
        (("--max-tau-loss", "1%", "--max-bytes", "9" * 400), "expected bytes such as 400MiB or 4096, found '999"),
        (("--max-tau-loss", "1%", "--steps", "9"), "No such option '--steps'"),
    ],
)
def test_usage(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(click.UsageError) as error:
        run_here("search", DRAFT, "--features", "x", "-o", "x", *options)
    assert words in error.value.format_message()
