# SPDX-License-Identifier: Apache-2.0
"""Every command that writes, killed at many moments and run again: the old result or the new one, and no leftovers.

`python -m tests.cli.test_killed` does it. A child is forked for every run, so that the imports are paid for once. It is
killed (SIGKILL) at its n-th step in the file system, by Python's audit events: before a file is opened, renamed,
linked, removed, ... The command then runs again, whole.
"""

import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_trt.cli import cli
from tests.cli.commands import run
from tests.files.test_workspace import holding
from tests.paths import FIXTURES, REPOSITORY

DRAFT, TARGET = str(FIXTURES / "tiny-qwen3-dflash"), str(FIXTURES / "tiny-qwen3")
PROMPTS = ["--prompts", str(FIXTURES / "prompts.jsonl"), "--max-tokens", "2", "--max-prompts"]
DEPLOYMENT = str(REPOSITORY / "build_configs" / "gpt-oss-120b.b300x8.latency.yaml")
# The previous contents, and the new ones.
COMMANDS = {
    "build": (["build", DRAFT, "--target", TARGET, "--recipe", "fp8"], ["build", DRAFT, "--target", TARGET]),
    "build --recipe": (["build", DRAFT, "--target", TARGET], ["build", DRAFT, "--target", TARGET, "--recipe", "fp8"]),
    "quantize": (["quantize", DRAFT, "--recipe", "bf16"], ["quantize", DRAFT, "--recipe", "nvfp4"]),
    "capture": (
        ["capture", DRAFT, "--target", TARGET, *PROMPTS, "1"],
        ["capture", DRAFT, "--target", TARGET, *PROMPTS, "2"],
    ),
    "triton-repo": (["triton-repo", DEPLOYMENT, "--method", "none"], ["triton-repo", DEPLOYMENT]),
}


def check(name: str, count: int, folder: Path, *, is_new: bool) -> None:
    output = folder / "out"
    before, after = ([*arguments, "-o", str(output)] for arguments in COMMANDS[name])
    forced = [*after, "--force"]
    plan = [str(output), None if is_new else before, forced, count]
    command = [sys.executable, "-m", "tests.cli.test_killed"]
    result = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["steps"] > 10
    assert len(report["kills"]) == count
    for kill in report["kills"]:
        assert kill["killed"], kill
        assert kill["left"] in ("old", "new"), kill
        assert kill["again"], kill
        assert kill["names"] == (["out"] if is_new else ["kept", "out"]), kill


def test_killed_while_it_replaces(tmp_path: Path) -> None:
    check("build", 3, tmp_path, is_new=False)


@pytest.mark.full
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_many_moments(name: str, is_new: bool, tmp_path: Path) -> None:
    check(name, 40, tmp_path, is_new=is_new)


@pytest.mark.parametrize(
    "arguments",
    [
        ["build", DRAFT, "--target", TARGET],
        ["quantize", DRAFT, "--recipe", "nvfp4"],
        ["capture", DRAFT, "--target", TARGET, *PROMPTS, "1"],
        ["search", DRAFT, "--max-tau-loss", "50%", "--features"],
        ["recover", DRAFT, "--recipe", "nvfp4", "--features"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_another_process_writes_it(arguments: list[str], features: dict[str, Path], tmp_path: Path) -> None:
    """One at a time, or both would go on with one journal."""
    needed = [features["tiny-qwen3"]] if arguments[-1] == "--features" else []
    with holding(tmp_path / "out") as process:
        held = list(tmp_path.iterdir())
        result = run(*arguments, *needed, "-o", tmp_path / "out")
        assert list(tmp_path.iterdir()) == held
    assert result.returncode == 1
    assert f": another command that writes it (process {process.pid} on " in result.stderr
    assert "hint: wait for its end or choose another -o " in result.stderr


STEPS = ("open", "os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "shutil.rmtree", "os.chmod")


def forked(arguments: list[str], kill_at: int | None) -> int | None:
    """The number of its steps; None where the command was killed before its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, values: tuple[object, ...]) -> None:
            nonlocal count
            if event in STEPS or event.startswith("ctypes.dlsym"):
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        with open(os.devnull, "w") as null:  # noqa: PTH123
            os.dup2(null.fileno(), 1)
            sys.addaudithook(hook)
            try:
                cli.main(arguments, prog_name="dflash-trt", standalone_mode=False)
                code = 0
            finally:
                os.write(writer, str(count).encode())
                os._exit(code)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        text = stream.read()
    if os.WIFSIGNALED(status):
        return None
    assert os.waitstatus_to_exitcode(status) == 0, "the command failed"
    return int(text)


def here(arguments: list[str]) -> None:
    """The command in this process."""
    with contextlib.redirect_stdout(io.StringIO()):
        cli.main(arguments, prog_name="dflash-trt", standalone_mode=False)


def contents(path: Path) -> dict[str, str]:
    """Hash of every file by name; empty where there is nothing."""
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    return {str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()}


def kill_and_run() -> None:
    """Prints a JSON list: of each kill the step, what stood there then, and what after the next run."""
    output, before, after, count = json.load(sys.stdin)
    final = Path(output)
    kept = final.with_name("kept")
    here(after)  # imports what it imports late, once for all children
    steps = 0
    if before:
        remove(final)
        here(before)
        shutil.move(final, kept)
    old = contents(kept)
    report = []
    chosen = random.Random(0)
    for trial in range(count + 1):
        remove(final)
        if before:
            copy(kept, final)
        kill_at = chosen.randrange(1, steps + 1) if trial else None
        finished = forked(after, kill_at)
        if trial == 0:
            assert finished is not None
            steps, new = finished, contents(final)
            continue
        left, killed = contents(final), finished is None
        forked(after, None)
        names = sorted(p.name for p in final.parent.iterdir())
        state = "old" if left == old else "new" if left == new else "neither"
        report.append(
            {"step": kill_at, "killed": killed, "left": state, "again": contents(final) == new, "names": names}
        )
    json.dump({"steps": steps, "kills": report}, sys.stdout)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def copy(source: Path, path: Path) -> None:
    shutil.copytree(source, path) if source.is_dir() else shutil.copyfile(source, path)


if __name__ == "__main__":
    kill_and_run()
