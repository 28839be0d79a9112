# SPDX-License-Identifier: Apache-2.0
"""A full disk and a killed process: DIR is complete or not there, and nothing stays behind for long."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import BuildError
from tests.checkpoint.samples import refusal
from tests.engine.test_write import build, contents

# `dflash-trt build` that says so and waits once the weights and the first graph are written.
WAITING = """
import time
import onnx.checker
def wait(file):
    print("writing", flush=True)
    time.sleep(60)
onnx.checker.check_model = wait
from dflash_trt.cli import main
main()
"""
# `dflash-trt build` on a disk where no file can grow beyond 20 kB.
FULL_DISK = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from dflash_trt.cli import main
main()
"""


def command(script: str, draft: Path, target: Path, output: Path, *options: str) -> list[str]:
    return [
        sys.executable, "-c", script, "build", str(draft), "--target", str(target), "-o", str(output), *options
    ]  # fmt: skip


@contextmanager
def half_built(draft: Path, target: Path, output: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A build that stands still in the middle."""
    arguments = command(WAITING, draft, target, output, *options)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        (partial,) = partials(output.parent)
        assert {"model.safetensors", "context.onnx"} <= set(names(partial / "new"))
        yield process
        process.kill()


def partials(directory: Path) -> list[Path]:
    return [entry for entry in directory.iterdir() if entry.name.startswith(".")]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_interrupted(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    with half_built(draft_dir, target_dir, tmp_path / "out") as process:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert names(tmp_path) == ["draft", "target"]


def test_force_keeps_the_old_engine_until_the_new_one_is_complete(
    draft_dir: Path, target_dir: Path, tmp_path: Path
) -> None:
    """SIGTERM; tests/cli/test_killed.py has SIGKILL."""
    build(draft_dir, target_dir, tmp_path / "out")
    before = contents(tmp_path / "out")
    with half_built(draft_dir, target_dir, tmp_path / "out", "--force") as process:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 143
    assert contents(tmp_path / "out") == before
    build(draft_dir, target_dir, tmp_path / "out", "--force")
    assert names(tmp_path) == ["draft", "out", "target"]
    assert contents(tmp_path / "out") == before


def test_a_second_build_leaves_a_running_one_alone(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    with half_built(draft_dir, target_dir, tmp_path / "out"):
        build(draft_dir, target_dir, tmp_path / "out")
        (partial,) = partials(tmp_path)
        assert (partial / "new" / "model.safetensors").is_file()
    read_manifest(tmp_path / "out")


def test_full_disk(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    arguments = command(FULL_DISK, draft_dir, target_dir, tmp_path / "out")
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {tmp_path / 'out'}: expected to write it, found: File too large\n\n"
        "hint: free disk space or choose another -o DIR\n"
    )
    assert names(tmp_path) == ["draft", "target"]


@pytest.mark.parametrize("name", ["context.onnx", "draft.onnx", "manifest.json"])
def test_disk_full_later(
    name: str, draft_dir: Path, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bytes = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        if self.name == name:
            write_bytes(self, content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_bytes(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    message = refusal(lambda: build(draft_dir, target_dir, tmp_path / "out"), BuildError)
    assert "out: expected to write it, found: No space left on device" in message
    assert names(tmp_path) == ["draft", "target"]
