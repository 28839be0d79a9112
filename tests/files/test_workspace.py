# SPDX-License-Identifier: Apache-2.0
"""The next process settles what killed ones left; what others use stays."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_trt.errors import BuildError
from dflash_trt.files import workspace as workspaces
from dflash_trt.files.workspace import recover_abandoned, workspace
from dflash_trt.files.write import OutputKind, new_file
from tests.files.test_write import make, names
from tests.waiting import PATIENCE

# Holds a workspace for tmp/out, moved aside as far as SCRIPT says, until it is killed.
HOLDING = """
import sys, time
from pathlib import Path
from dflash_trt.files.workspace import workspace
with workspace(Path(sys.argv[1])) as directory:
    (directory / "new").mkdir()
    (directory / "new" / "file").write_text("half")
    exec(sys.argv[2])
    print("holding", flush=True)
    time.sleep(3600)
"""
MOVED_ASIDE = "(directory / 'old').mkdir(); Path(sys.argv[1]).rename(directory / 'old' / 'out')"


@contextmanager
def holding(path: Path, then: str = "") -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", HOLDING, str(path), then]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holding\n"
        try:
            yield process
        finally:
            process.kill()


def killed_while_holding(path: Path, then: str = "") -> None:
    with holding(path, then) as process:
        process.kill()
        process.wait()


def test_one_in_use_stays(tmp_path: Path) -> None:
    """Process ids play no part: containers that share a volume have the same ones."""
    with holding(tmp_path / "out") as process:
        (held,) = names(tmp_path)
        with pytest.raises(BuildError, match=rf": another command that writes it \(process {process.pid} on ") as one:
            make(tmp_path / "out")
        assert one.value.hint == "wait for its end or choose another -o DIR"
        make(tmp_path / "other")
        with new_file(tmp_path / "out", CACHE) as cache:
            cache.touch()
        assert names(tmp_path) == sorted([held, "other", "out"])
        assert (tmp_path / held / "new" / "file").read_text() == "half"


CACHE = OutputKind(name="a cache", recognizes=lambda file: True, form="file", is_cache=True)


@pytest.mark.full
def test_of_many_that_begin_at_once_one_goes_on(tmp_path: Path) -> None:
    begin, end = multiprocessing.Barrier(8), multiprocessing.Barrier(8)

    def work() -> None:
        for number in range(20):
            begin.wait(PATIENCE)
            try:
                with workspace(tmp_path / f"out{number}"):
                    (tmp_path / f"{number} {os.getpid()}").touch()
                    end.wait(PATIENCE)
            except OSError:
                end.wait(PATIENCE)

    processes = [multiprocessing.get_context("fork").Process(target=work) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0] * 8
    assert sorted(name.partition(" ")[0] for name in names(tmp_path)) == sorted(map(str, range(20)))


@pytest.mark.parametrize("name", ["out", "another", "out[1]", "o\nt", ".hidden"])
def test_of_a_killed_process_nothing_stays(name: str, tmp_path: Path) -> None:
    killed_while_holding(tmp_path / name)
    assert len(names(tmp_path)) == 1
    make(tmp_path / "out")
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_what_was_moved_aside_comes_back(force: bool, tmp_path: Path) -> None:
    """Killed between the two renames of a replacement."""
    make(tmp_path / "out", content="old")
    killed_while_holding(tmp_path / "out", MOVED_ASIDE)
    assert not (tmp_path / "out").exists()
    make(tmp_path / "elsewhere")
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == ["elsewhere", "out"]


def test_what_was_moved_aside_does_not_displace_what_is_there(tmp_path: Path) -> None:
    make(tmp_path / "out", content="old")
    killed_while_holding(tmp_path / "out", MOVED_ASIDE)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("newer")
    recover_abandoned(tmp_path)
    assert (tmp_path / "out" / "file").read_text() == "newer"
    assert names(tmp_path) == ["out"]


def test_killed_before_it_had_a_lock(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    make(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_what_only_looks_alike_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "owner").touch()
    (tmp_path / ".link.partial").symlink_to(victim)
    (tmp_path / ".full.partial").mkdir()
    (tmp_path / ".full.partial" / "notes").touch()
    (tmp_path / ".file.partial").touch()
    (tmp_path / "visible.partial").mkdir()
    before = names(tmp_path)
    recover_abandoned(tmp_path)
    for name in ("link", "full", "file"):
        with pytest.raises(BuildError, match=rf"\.{name}\.partial"):
            make(tmp_path / name)
    assert names(tmp_path) == before
    assert names(victim) == ["owner"]
    assert names(tmp_path / ".full.partial") == ["notes"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces in use cannot be told from abandoned ones, so nothing is removed."""

    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    killed_while_holding(tmp_path / "out")
    left = names(tmp_path)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    make(tmp_path / "out")
    assert names(tmp_path) == [*left, "out"]


def test_one_that_is_removed_while_it_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, calls = fcntl.flock, []

    def removed_first(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            shutil.rmtree(tmp_path / ".out.partial")  # the owner has ended
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with workspace(tmp_path / "out") as directory:
        assert len(calls) == 2
        assert names(directory) == ["owner"]
    assert names(tmp_path) == []


def test_one_that_is_tested_for_its_owner_is_not_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process locks it for a moment while it looks for abandoned ones."""
    flock, calls = fcntl.flock, []

    def tested_first(descriptor: int, operation: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise BlockingIOError
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", tested_first)
    with workspace(tmp_path / "out") as directory:
        assert names(directory) == ["owner"]


def test_one_process_may_write_on_the_way_to_its_result(tmp_path: Path) -> None:
    with workspace(tmp_path / "out") as outer, workspace(tmp_path / "out") as inner:
        assert outer != inner
        recover_abandoned(tmp_path)  # like another process
        assert names(inner) == ["owner"]
    assert names(tmp_path) == []


class NoExchange:
    """C library of a system whose file systems cannot exchange two names."""

    @staticmethod
    def renameat2(*_: object) -> int:
        return -1


def test_without_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "LIBC", NoExchange)
    make(tmp_path / "out", content="old")
    make(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert names(tmp_path) == ["out"]


def test_stopped_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspaces, "LIBC", NoExchange)
    make(tmp_path / "out", content="old")
    rename = Path.rename

    def interrupted(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "file").read_text() == "old"
    assert names(tmp_path) == ["out"]
