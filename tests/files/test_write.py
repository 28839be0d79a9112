# SPDX-License-Identifier: Apache-2.0
"""Directories that are complete or not there, and safetensors files written tensor by tensor."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint import safetensors_writer
from dflash_trt.checkpoint.safetensors_file import StoredTensor, read_tensors
from dflash_trt.checkpoint.safetensors_writer import write_safetensors
from dflash_trt.errors import BuildError
from dflash_trt.files.write import OutputKind, new_directory, new_file, scratch_directory
from tests.checkpoint.samples import refusal

NOTES = OutputKind(name="a directory of notes", recognizes=lambda directory: (directory / "file").is_file())
NOTE = OutputKind(
    name="a note", recognizes=lambda file: file.read_text() in ("old", "new"), form="file", option="-o FILE"
)


def make(path: Path, *, force: bool = False, content: str = "new") -> None:
    with new_directory(path, NOTES, force=force) as directory:
        (directory / "file").write_text(content)


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out"
    with new_directory(path, NOTES) as directory:
        (directory / "file").write_text("new")
        assert not path.exists()
        assert directory.parent.parent == path.parent
        assert directory.parent.stat().st_mode & 0o777 == 0o700  # no other user gets in
    assert names(path.parent) == ["out"]
    assert names(path) == ["file"]
    assert path.stat().st_mode & 0o700 == 0o700


@pytest.mark.parametrize(
    ("number", "hint"),
    [(errno.EROFS, "choose another -o DIR"), (errno.ENOSPC, "free disk space or choose another -o DIR")],
)
def test_only_a_full_disk_asks_for_space(number: int, hint: str, tmp_path: Path) -> None:
    said = f"cannot write .*: {os.strerror(number)}"
    with pytest.raises(BuildError, match=said) as caught, new_directory(tmp_path / "out", NOTES):
        raise OSError(number, os.strerror(number))
    assert caught.value.hint == hint
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    def stop_halfway() -> None:
        with new_directory(tmp_path / "a" / "b" / "out", NOTES) as directory:
            (directory / "file").write_text("half")
            raise error

    with pytest.raises(error):
        stop_halfway()
    assert names(tmp_path) == []


def test_existing_directory(tmp_path: Path) -> None:
    make(tmp_path / "out", content="old")
    message = refusal(lambda: make(tmp_path / "out"), BuildError)
    assert message.startswith(f"{tmp_path / 'out'} already exists\n")
    assert "hint: choose another -o DIR, or replace it with --force" in message
    assert (tmp_path / "out" / "file").read_text() == "old"


def make_file(path: Path, *, force: bool = False) -> None:
    with new_file(path, NOTE, force=force) as file:
        file.write_text("new")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("write", "precious", "found", "option"),
    [
        (make, "out", "out already exists and is not a directory", "-o DIR"),
        (make, "out/precious", "out already exists and is not a directory of notes", "-o DIR"),
        (make_file, "out", "out already exists and is not a note", "-o FILE"),
    ],
)
def test_nothing_of_another_kind_is_replaced(
    write: Callable[..., None], precious: str, found: str, option: str, force: bool, tmp_path: Path
) -> None:
    (tmp_path / precious).parent.mkdir(exist_ok=True)
    (tmp_path / precious).write_text("precious")
    message = refusal(lambda: write(tmp_path / "out", force=force), BuildError)
    assert found in message
    assert message.endswith(f"hint: choose another {option}")
    assert (tmp_path / precious).read_text() == "precious"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("is_empty", [False, True])
def test_force_replaces(is_empty: bool, tmp_path: Path) -> None:
    if is_empty:
        (tmp_path / "out").mkdir()
    else:
        make(tmp_path / "out", content="old")
        (tmp_path / "out" / "stale").touch()
    make(tmp_path / "out", force=True)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["file"]


def test_what_has_become_of_another_kind_meanwhile_is_kept(tmp_path: Path) -> None:
    make(tmp_path / "out", content="old")

    def replace_while_somebody_moves_in() -> None:
        with new_directory(tmp_path / "out", NOTES, force=True) as directory:
            (directory / "file").touch()
            (tmp_path / "out" / "file").rename(tmp_path / "out" / "precious")

    assert "already exists and is not a directory of notes" in refusal(replace_while_somebody_moves_in, BuildError)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["precious"]


def test_force_keeps_the_old_one_when_the_new_one_fails(tmp_path: Path) -> None:
    make(tmp_path / "out", content="old")
    with pytest.raises(ValueError, match="no"), new_directory(tmp_path / "out", NOTES, force=True):
        raise ValueError("no")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def make_while_another_process_does() -> None:
        with new_directory(tmp_path / "out", NOTES):
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "file").write_text("the other process")

    assert "already exists" in refusal(make_while_another_process_does, BuildError)
    assert (tmp_path / "out" / "file").read_text() == "the other process"
    assert names(tmp_path) == ["out"]


def test_through_a_link(tmp_path: Path) -> None:
    make(tmp_path / "real", content="old")
    (tmp_path / "out").symlink_to("real")
    make(tmp_path / "out", force=True)
    assert names(tmp_path) == ["out", "real"]
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "real" / "file").read_text() == "new"


def test_this_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "out", content="old")
    monkeypatch.chdir(tmp_path / "out")
    make(Path(), force=True)
    assert (tmp_path / "out" / "file").read_text() == "new"


@pytest.mark.parametrize(
    ("path", "found"),
    [("file/out", "Not a directory"), ("a" * 250, "File name too long"), ("loop", "Too many levels of symbolic links")],
)
def test_unwritable(path: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    message = refusal(lambda: make(tmp_path / path), BuildError)
    assert f"cannot write {tmp_path / path}: {found} (" in message
    assert "hint: choose another -o DIR" in message
    assert names(tmp_path) == ["file", "loop"]


def test_a_file(tmp_path: Path) -> None:
    make_file(tmp_path / "out")
    assert (tmp_path / "out").read_text() == "new"
    assert "hint: choose another -o FILE, or replace it with --force" in refusal(
        lambda: make_file(tmp_path / "out"), BuildError
    )
    (tmp_path / "out").write_text("old")
    make_file(tmp_path / "out", force=True)
    assert (tmp_path / "out").read_text() == "new"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("make_it", [lambda path: path.mkdir(), os.mkfifo])
def test_what_is_no_file_is_no_file_to_replace(make_it: Callable[[Path], None], tmp_path: Path) -> None:
    make_it(tmp_path / "out")
    assert "out already exists and is not a file" in refusal(
        lambda: make_file(tmp_path / "out", force=True), BuildError
    )


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    def write_while_another_process_does() -> None:
        with new_file(tmp_path / "out", NOTE) as file:
            file.write_text("new")
            (tmp_path / "out").write_text("old")

    refusal(write_while_another_process_does, BuildError)
    assert (tmp_path / "out").read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_scratch_leaves_nothing(tmp_path: Path) -> None:
    with scratch_directory(tmp_path / "out") as scratch:
        make(scratch)
        make(tmp_path / "out")  # another workspace at the same place
        assert names(scratch) == ["file"]
    assert names(tmp_path) == ["out"]


def test_a_missing_source_is_named(draft_dir: Path, tmp_path: Path) -> None:
    tensors = read_tensors(draft_dir / "model.safetensors")
    (draft_dir / "model.safetensors").unlink()

    def copy() -> None:
        with new_directory(tmp_path / "out", NOTES) as directory:
            write_safetensors(directory / "w.safetensors", list(tensors.values()))

    message = refusal(copy, BuildError)
    assert f": No such file or directory ({draft_dir / 'model.safetensors'})" in message


def test_written_safetensors_are_the_same_tensors(
    draft_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_writer, "CHUNK_BYTES", 1000)  # several chunks a tensor
    source = list(read_tensors(draft_dir / "model.safetensors").values())
    file = tmp_path / "w.safetensors"
    write_safetensors(file, source[::-1])
    written = read_tensors(file)
    assert written.keys() == {tensor.name for tensor in source}
    assert min(tensor.offset for tensor in written.values()) % 8 == 0
    expected = load_file(draft_dir / "model.safetensors")
    for name, tensor in load_file(file).items():
        assert torch.equal(tensor.view(torch.int16), expected[name].view(torch.int16))


def test_written_safetensors_with_odd_tensors(tmp_path: Path) -> None:
    tensors = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5), "ü\n": torch.ones(3, dtype=torch.int8)}
    save_file(tensors, tmp_path / "a.safetensors")
    write_safetensors(tmp_path / "b.safetensors", list(read_tensors(tmp_path / "a.safetensors").values()))
    copied = load_file(tmp_path / "b.safetensors")
    assert copied.keys() == tensors.keys()
    assert all(torch.equal(copied[name], tensor) for name, tensor in tensors.items())


def test_a_source_that_shrinks_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    tensor = StoredTensor(name="w", dtype="U8", shape=(12,), file=tmp_path / "a", offset=2, num_bytes=12)
    with pytest.raises(OSError, match="'w' ended 4 bytes early"):
        write_safetensors(tmp_path / "b", [tensor])
