# SPDX-License-Identifier: Apache-2.0
"""What the user names becomes a directory: a path, or a repository id in Hugging Face's cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.source import checkpoint_directory, checkpoint_label
from tests.checkpoint.samples import cache_repository, refusal


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_directory(draft_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint_directory(str(draft_dir)) == draft_dir
    monkeypatch.chdir(draft_dir.parent)
    assert checkpoint_directory("draft") == Path("draft")
    monkeypatch.setenv("HOME", str(draft_dir.parent))
    assert checkpoint_directory("~/draft") == draft_dir


def test_a_directory_beats_a_repository_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert checkpoint_directory("owner/name") == Path("owner/name")


def test_cached_repository(cache: Path, draft_dir: Path) -> None:
    snapshot = cache_repository(cache, "owner/name", draft_dir)
    assert checkpoint_directory("owner/name") == snapshot
    assert read_draft(snapshot).spec == read_draft(draft_dir).spec


def test_repository_that_is_not_cached(cache: Path) -> None:
    message = refusal(lambda: checkpoint_directory("owner/name"))
    assert "owner/name: no files in the Hugging Face cache, and HF_HUB_OFFLINE is set\n" in message
    assert "hint: on a machine with network: hf download owner/name" in message


def test_a_partly_cached_repository_lacks_its_weights(cache: Path, draft_dir: Path) -> None:
    (draft_dir / "model.safetensors").unlink()
    cache_repository(cache, "owner/name", draft_dir)
    message = refusal(lambda: read_draft(checkpoint_directory("owner/name")))
    assert "owner/name: no weights in the Hugging Face cache, and HF_HUB_OFFLINE is set\n" in message


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError, ["the repository is gated", "https://huggingface.co/owner/name", "hf auth login"]),
        (RepositoryNotFoundError, ["neither a local directory", "hint: check the spelling", "hf auth login"]),
        (ConnectionError, ["the hub cannot be reached: ConnectionError", "hf download owner/name"]),
    ],
)
def test_hub_errors(error: type[Exception], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    message = refusal(lambda: checkpoint_directory("owner/name"))
    for word in words:
        assert word in message


def test_a_file_is_no_directory(draft_dir: Path) -> None:
    message = refusal(lambda: checkpoint_directory(str(draft_dir / "config.json")))
    assert message.endswith("config.json: expected a checkpoint directory, found a file")


@pytest.mark.parametrize(
    "name", ["", "nothing", "./nothing", "/nothing/here", "~/nothing", "~nobody-at-all/x", "a/b/c", "a b/c", "\udcff"]
)
def test_neither_directory_nor_repository(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(lambda: checkpoint_directory(name))
    assert message.startswith(repr(name))
    assert "neither a checkpoint directory nor a Hugging Face repository id (owner/name)" in message


@pytest.mark.parametrize("name", ["owner/..", "owner/a--b", "owner/-a", "owner/" + "a" * 100])
def test_not_a_repository_id_after_all(name: str, cache: Path) -> None:
    assert f"{name}: neither a local directory nor a Hugging Face" in refusal(lambda: checkpoint_directory(name))


def test_name_too_long_for_a_file() -> None:
    assert "found: File name too long" in refusal(lambda: checkpoint_directory("a" * 5000))


@pytest.mark.parametrize(
    "spell",
    [str, lambda path: f"{path}/", lambda path: f"{path}/../draft", lambda path: "~/draft", lambda path: "draft"],
)
def test_label_is_never_a_path(spell: Callable[[Path], str], draft_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(draft_dir.parent))
    monkeypatch.chdir(draft_dir.parent)
    assert checkpoint_label(spell(draft_dir)) == "draft"


def test_label_of_this_directory(draft_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(draft_dir)
    assert checkpoint_label(".") == "draft"


def test_label_of_a_repository() -> None:
    assert checkpoint_label("owner/name") == "owner/name"


def test_label_is_unicode(tmp_path: Path) -> None:
    directory = tmp_path / "x\udcff"
    directory.mkdir()
    assert checkpoint_label(str(directory)) == "x?"
