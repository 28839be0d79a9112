# SPDX-License-Identifier: Apache-2.0
"""The command line as others rely on it: options (tests/golden/cli.txt), help, completion and --version."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import shell_complete

from dflash_trt import _C, __version__
from dflash_trt.cli import cli, leaves
from dflash_trt.cli.help_sections import COMMANDS, OPTIONS
from dflash_trt.cli.version import commit, kernels
from tests.cli.commands import run, surface
from tests.paths import REPOSITORY

GOLDEN = REPOSITORY / "tests" / "golden" / "cli.txt"


def test_surface_is_frozen() -> None:
    """After a wanted change: python -m tests.cli.test_surface"""
    assert surface() == GOLDEN.read_text()


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_help_of_every_command(name: str) -> None:
    command = cli.commands[name]
    with click.Context(command, info_name=name) as context:
        text = command.get_help(context)
    assert f"\n    dflash-trt {name} " in text or f"\n    dflash-trt {name}\n" in f"{text}\n"  # the example
    assert command.short_help is not None
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
            assert parameter.metavar or parameter.is_flag or parameter.type.name != "text", parameter.name


def test_commands_are_grouped_as_in_the_readme() -> None:
    rows = re.findall(r"^\| (`.+`) \| ", (REPOSITORY / "README.md").read_text(), re.MULTILINE)
    assert [re.findall(r"`([a-z-]+)`", row) for row in rows] == [list(names) for names in COMMANDS.values()]
    assert {name for names in COMMANDS.values() for name in names} == set(cli.commands)
    lines = run("--help").stdout.splitlines()
    assert [line.rstrip(":") for line in lines if line.rstrip(":") in COMMANDS] == list(COMMANDS)


def test_options_are_grouped() -> None:
    known = {parameter.name for leaf in leaves(cli) for parameter in leaf.params} | {"help"}
    names = [name for group in OPTIONS.values() for name in group]
    assert len(names) == len(set(names))
    assert known >= set(names)
    text = run("serve", "--help").stdout
    for title in ("Options:", "Runtime:", "HTTP:", "Output and log:"):
        assert f"\n{title}\n" in text
    for leaf in leaves(cli):
        shown = run(*_path(leaf), "--help").stdout
        assert all(option.opts[0] in shown for option in leaf.params if isinstance(option, click.Option))


def _path(leaf: click.Command) -> list[str]:
    return next(
        [name, *([] if command is leaf else [str(leaf.name)])]
        for name, command in cli.commands.items()
        if leaf in leaves(command)
    )


def test_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completion works as --help says; click writes the script, under the name of the command."""
    assert "_DFLASH_TRT_COMPLETE=bash_source dflash-trt" in run("--help").stdout
    monkeypatch.setenv("_DFLASH_TRT_COMPLETE", "bash_source")
    result = subprocess.run([f"{sys.prefix}/bin/dflash-trt"], capture_output=True, text=True, check=True)
    assert "_DFLASH_TRT_COMPLETE=bash_complete" in result.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("serve-config gpt-oss-20b.h1", "plain,gpt-oss-20b.h100x1.latency"),
        ("quantize z-lab/gpt", "plain,z-lab/gpt-oss-120b-DFlash"),
        ("quantize draft --recipe mixed", "plain,mixed-nvfp4-fp8"),
        ("inspect draft --target openai/gpt-oss-1", "plain,openai/gpt-oss-120b"),
        ("doctor ./eng", "file,./eng"),
        ("serve-config engine --gpus b300x8", "plain,b300x8"),
    ],
)
def test_names_and_paths_are_completed(
    words: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_WORDS", f"dflash-trt {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert shell_complete(cli, {}, "dflash-trt", "_DFLASH_TRT_COMPLETE", "bash_complete") == 0
    assert expected in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", ["draft", "target", "recipe", "config", "source", "path", "subject", "engine"])
def test_every_argument_that_names_a_file_is_completed(name: str) -> None:
    """A plain string offers the shell nothing, not even paths."""
    for path, parameter in _parameters(cli):
        if parameter.name == name:
            assert parameter.type.shell_complete(click.Context(cli), parameter, "x"), path


def options_where(is_meant: Callable[[click.Parameter], bool]) -> pytest.MarkDecorator:
    """Runs a test with the words of each such option."""
    words = [[*_path(leaf), each.opts[0]] for leaf in leaves(cli) for each in leaf.params if is_meant(each)]
    return pytest.mark.parametrize("words", words, ids=" ".join)


@options_where(lambda option: isinstance(option.type, click.types.FloatParamType))
def test_numbers_are_finite(words: list[str]) -> None:
    for value in ("nan", "inf", "1e400"):
        done = run(*words, value)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{words[-1]}': expected a finite number, found '{value}'" in " ".join(done.stderr.split())


@options_where(lambda option: option.name in ("seconds", "request_timeout", "drain_seconds"))
def test_waits_end(words: list[str]) -> None:
    """A thread's timer fails on the largest numbers."""
    done = run(*words, 10**300)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is not in the range" in done.stderr


def _parameters(group: click.Group) -> Iterator[tuple[str, click.Parameter]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _parameters(command)
        yield from ((name, parameter) for parameter in command.params)


def git(checkout: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", "-C", checkout, *identity, *words], check=True, capture_output=True, text=True).stdout


def test_version() -> None:
    lines = run("--version").stdout.splitlines()
    assert lines[0] == f"dflash-trt, version {__version__}"
    assert lines[1] == f"commit: {commit()}"
    assert lines[2] == f"kernels: {kernels()}"


def test_the_changelog_begins_with_this_version() -> None:
    assert re.search(r"^## (\S+)", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == __version__


def test_the_commit_of_a_checkout_is_what_git_says_now(tmp_path: Path) -> None:
    (package := tmp_path / "dflash_trt").mkdir()
    (package / "commit").write_text("recorded\n")
    assert commit(package) == "recorded"
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=a")
    git(tmp_path, "tag", "v0")
    head = git(tmp_path, "rev-parse", "HEAD")[:12]
    assert commit(package) == head
    (package / "commit").write_text("changed\n")
    assert commit(package) == f"{head}-dirty"
    shutil.rmtree(tmp_path / ".git" / "refs")
    assert commit(package).startswith("not known: fatal")


def test_a_build_without_git_says_so(tmp_path: Path) -> None:
    (package := tmp_path / "dflash_trt").mkdir()
    assert commit(package) == "not recorded by the build"
    (package / "commit").write_text("\n")
    assert commit(package) == "not recorded by the build"


def test_kernels_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cuda_architectures", lambda: ["80", "90a", "100f", "90-virtual"])
    assert kernels() == "SM 8.0, SM 9.0a, SM 10.0f, PTX for SM 9.0 and later"
    monkeypatch.setattr(_C, "cuda_architectures", list)
    assert kernels().startswith("none: built without nvcc")


if __name__ == "__main__":
    GOLDEN.write_text(surface())
