# SPDX-License-Identifier: Apache-2.0
"""0 done, 1 the user can fix it, 2 usage, 70 our bug; stdout is data, stderr is talk."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from dflash_trt.cli.failure import EXTRAS
from tests.cli.commands import run, run_process
from tests.engines import trained_engine
from tests.paths import FIXTURES

# main() without some packages, as if they were not installed.
WITHOUT = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {packages!r} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
from dflash_trt.cli import main
main()
"""
# The command, which Ctrl-C reaches while it imports.
AT_ONCE = """
import os, signal, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Stop())
from dflash_trt.__main__ import main
main()
"""

# `inspect`, which SIGTERM reaches at its work.
TERMINATED = """
import os, signal, sys
from dflash_trt.cli import main
sys.modules["dflash_trt.cli.inspect"].read_draft = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
main()
"""


def inspect_raising(error: BaseException, *options: str) -> subprocess.CompletedProcess[str]:
    """`inspect` where reading a draft raises that."""
    module = sys.modules["dflash_trt.cli.inspect"]  # the attribute of that name is the command
    with patch.object(module, "read_draft", Mock(side_effect=error)):
        return run("inspect", FIXTURES / "tiny-qwen3-dflash", *options)


def test_done(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    """By a command that needs no extra; of these onnx brings protobuf (google), too."""
    arguments = ("build", draft_dir, "--target", target_dir, "-o", engine := tmp_path / "out")
    result = run_process(*arguments, script=WITHOUT.format(packages=tuple(EXTRAS.keys() - {"google"})))
    assert (result.returncode, result.stdout) == (0, f"{engine}\n")
    assert result.stderr == (
        f"{draft_dir}: shapes fit target {target_dir}; trained for: not known\n"
        f"next: dflash-trt verify {engine} --prompts FILE; then: dflash-trt serve {engine}\n"
    )


def test_the_user_can_mend_it(tmp_path: Path) -> None:
    result = run("inspect", tmp_path)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {tmp_path / 'config.json'}: no such file: expected a model configuration\n\n"
        "hint: check the path to the checkpoint\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect"], "Missing argument 'PATH'"),
        (["inspect", "a", "--jsn"], "--jsn"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["generate", "engine", "--target", "t"], "give either PROMPT or --token-ids FILE"),
        (["generate", "engine", "--token-ids", "b", "--chat", "--target", "t"], "--chat wraps text"),
        (["generate", "engine", "a", "--target", "t", "--max-tokens", "0"], "0 is not in the range"),
    ],
)
def test_usage(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert words in result.stderr
    assert "Usage: dflash-trt" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "error", [ValueError("ours"), KeyError("ours"), ModuleNotFoundError("ours", name="json5")], ids=repr
)
def test_bug(error: Exception) -> None:
    result = inspect_raising(error, "--json")
    assert result.returncode == 70
    assert json.loads(result.stdout)["error"].startswith("this is a bug in dflash-trt")
    assert "Traceback (most recent call last):" in result.stderr
    assert "ours" in result.stderr
    assert "error: this is a bug in dflash-trt; please report it with the lines above" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inspect", "nowhere", "--json"], 1, "neither a checkpoint directory nor a Hugging Face repository id"),
        (["inspect", "--json", "--frob", "nowhere"], 2, "No such option"),
        (["verify", "e", "--target", "t", "--prompts", "p", "--json", "--max-tau-loss", "3%"], 2, "needs --reference"),
        (["frobnicate", "--json"], 2, "No such command 'frobnicate'"),
    ],
)
def test_an_error_is_one_document(arguments: list[str], code: int, words: str) -> None:
    result = run(*arguments)
    assert result.returncode == code
    document = json.loads(result.stdout)
    assert document.keys() == {"schema", "error", "hint"}
    assert document["schema"] == "dflash-trt/error/1"
    assert words in document["error"]
    assert words in result.stderr


def test_a_document_and_then_an_error_are_one_document(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("max_batch_size: eight\n")
    result = run("serve-config", "--runtime", "trtllm", "--check", file, "--json")
    assert result.returncode == 1
    assert json.loads(result.stdout)["schema"] == "dflash-trt/serve-config-check/1"
    assert run("inspect", "--", "--json").stdout == "", "behind two dashes it is no option"


def test_interrupted_while_it_imports() -> None:
    result = run_process("inspect", "nowhere", script=AT_ONCE)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")  # 130 in a shell


def test_interrupted() -> None:
    result = inspect_raising(KeyboardInterrupt(), "--json")
    assert result.returncode == 130
    assert json.loads(result.stdout)["error"] == "interrupted"
    assert result.stderr == "\nerror: interrupted\n"


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), pytest.param("SIGHUP", 129, marks=pytest.mark.full)])
def test_terminated(name: str, code: int) -> None:
    result = run_process("inspect", FIXTURES / "tiny-qwen3-dflash", script=TERMINATED.replace("SIGTERM", name))
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


@pytest.mark.parametrize("name", ["", ".", "/", "loop"])
@pytest.mark.parametrize("command", ["capture", "search", "recover", "quantize"])
def test_what_is_no_name_of_an_output_is_refused_first(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    needed = {
        "capture": ["--target", FIXTURES / "tiny-qwen3", "--prompts", FIXTURES / "prompts.jsonl"],
        "search": ["--features", "x", "--max-tau-loss", "50%"], "recover": ["--features", "x", "--recipe", "nvfp4"],
        "quantize": ["--recipe", "nvfp4"],
    }  # fmt: skip
    result = run(command, FIXTURES / "tiny-qwen3-dflash", *needed[command], "-o", name)
    assert result.returncode == 1
    begins = f"cannot write {name}: Too many levels" if name == "loop" else f"{Path(name)} (already|would)"
    assert re.match(f"error: {begins}", result.stderr)
    assert "hint: choose another -o " in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["loop"]


def test_an_error_of_the_file_system_is_no_bug() -> None:
    result = inspect_raising(PermissionError(13, "Permission denied", "/some/file"))
    assert result.returncode == 1
    assert result.stderr.startswith("error: /some/file: expected to read or write, found: Permission denied\n\nhint: ")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise AttributeError('no _C')", "AttributeError: no _C"),
        ("raise OSError('libcudart.so: cannot open')", "OSError: libcudart.so: cannot open"),
        ("from json import nothing", "ImportError: cannot import name 'nothing' from 'json'"),
        ("import modelopt_needs_this", "ModuleNotFoundError: No module named 'modelopt_needs_this'"),
    ],
)
def test_a_broken_package_is_no_bug(code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of an installed package's own import names the package, and the extra that brings it."""
    (tmp_path / "modelopt").mkdir()
    (tmp_path / "modelopt" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "modelopt"]:
        monkeypatch.delitem(sys.modules, name)

    def broken(*_: object) -> None:
        import modelopt  # noqa: F401

    with patch.object(sys.modules["dflash_trt.cli.inspect"], "read_draft", broken):
        result = run("inspect", FIXTURES / "tiny-qwen3-dflash")
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: the installed package nvidia-modelopt cannot be imported: {words}")
    assert "pip install --force-reinstall 'dflash-trt[calibrate]'" in result.stderr


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.full)])
def test_full_stdout(draft_dir: Path, unbuffered: str) -> None:
    command = [sys.executable, "-m", "dflash_trt", "inspect", str(draft_dir), "--json"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert result.returncode == 1
    assert "expected to read or write, found: No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


def test_full_stderr(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    """The disk of a log must not fail work that is done."""
    command = ["build", draft_dir, "--target", target_dir, "-o", tmp_path / "engine"]
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "dflash_trt", *map(str, command)],
            stdout=subprocess.PIPE, stderr=full, text=True, check=False,
        )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, f"{tmp_path / 'engine'}\n")


def test_closed_pipe(draft_dir: Path) -> None:
    """`dflash-trt inspect ... | head -1` says nothing about it."""
    command = [sys.executable, "-m", "dflash_trt", "inspect", str(draft_dir), "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert "Traceback" not in result.stderr
    assert result.returncode == 1


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", pytest.param(">&-", marks=pytest.mark.full)])
def test_closed_streams(streams: str) -> None:
    """Files that the command opens do not take their numbers, and children find them open."""
    script = f'exec "$@" {streams}'
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "dflash_trt", "drafts"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "package",
    ["torch", *(pytest.param(name, marks=pytest.mark.full) for name in ("transformers", "onnxruntime"))],
)
def test_missing_extra_of_generate(package: str) -> None:
    arguments = ("generate", trained_engine("tiny-qwen3"), "prompt", "--target", FIXTURES / "tiny-qwen3")
    result = run_process(*arguments, script=WITHOUT.format(packages=(package,)))
    assert result.returncode == 1
    assert f"error: missing package {package}" in result.stderr
    assert f"hint: pip install 'dflash-trt[{EXTRAS[package]}]'" in result.stderr
