# SPDX-License-Identifier: Apache-2.0
"""Links, commands and options in the documents exist, and their examples run on the fixtures."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import takewhile
from pathlib import Path

import click
import pytest

from dflash_trt.cli import cli
from dflash_trt.cli.failure import EXTRAS
from tests.paths import FIXTURES, REPOSITORY

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = BLOCK.findall((REPOSITORY / "docs" / "runtime.md").read_text())


@pytest.fixture(scope="module")
def substitutes() -> dict[str, Path]:
    """Replacements for the names in the examples: fixture pairs, as an engine and as a draft."""
    target = FIXTURES / "tiny-qwen3"
    return {
        '"tests/fixtures/tiny-qwen3-dflash"': FIXTURES / "tiny-qwen3-dflash", '"tests/fixtures/tiny-qwen3"': target,
        '"z-lab/Qwen3-8B-DFlash-b16"': FIXTURES / "tiny-qwen3-dflash", '"Qwen/Qwen3-8B"': target,
    }  # fmt: skip


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example(
    code: str, substitutes: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    named = [name for name in substitutes if name in code]
    assert len(named) == 2, "an example without a drafter and its target"
    for name in named:
        code = code.replace(name, repr(str(substitutes[name])))
    exec(compile(code, "docs/runtime.md", "exec"), {})
    assert len(capsys.readouterr().out.strip()) > 10


ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def path_of_the_readme(title: str) -> str:
    """The commands below one heading of README."""
    section = (REPOSITORY / "README.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (script,) = FENCE.findall(section)
    return script


def run_script(script: str, cwd: Path) -> str:
    """stdout of a script that stops at the first command that fails; `cwd` sees the fixtures as a clone does."""
    (cwd / "tests").symlink_to(REPOSITORY / "tests")
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_deploy_path(tmp_path: Path) -> None:
    """Up to where a GPU begins, and without the hub."""
    assert "nothing wrong in what was checked" in run_script(path_of_the_readme("Deploy on a GPU machine"), tmp_path)
    steps = (tmp_path / "steps.sh").read_text()
    assert "serve openai/gpt-oss-120b" in steps
    assert 'dflash-trt doctor "$url"' in steps
    subprocess.run(["bash", "-n", tmp_path / "steps.sh"], check=True)


@pytest.mark.full
def test_compare_path(tmp_path: Path) -> None:
    """With the AIPerf that is on PATH; the first line would install it."""
    if shutil.which("aiperf") is None:
        pytest.skip("no aiperf on PATH: pip install 'dflash-trt[aiperf]'")
    install, _, script = path_of_the_readme("Compare on my traffic").partition("\n")
    assert install == "pip install --quiet 'dflash-trt[aiperf]'"
    demo = f"dflash-trt build {FIXTURES}/tiny-gpt-oss-dflash --target {FIXTURES}/tiny-gpt-oss -o demo\n"
    run_script(demo + script, tmp_path)
    assert "tau" in (tmp_path / "report" / "report.md").read_text()


def example(name: str, *arguments: object, cwd: Path) -> str:
    """The output of a program in docs/examples."""
    program = REPOSITORY / "docs" / "examples" / name
    command = [sys.executable if program.suffix == ".py" else "bash", program, *arguments]
    return subprocess.run(
        list(map(str, command)), cwd=cwd, env=ENVIRONMENT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@pytest.mark.full
def test_build_and_generate(tmp_path: Path) -> None:
    assert re.findall(r"# tau (\S+):", example("build_and_generate.py", cwd=tmp_path))[1] > "1.00"


@pytest.mark.full
def test_verify_with_a_loss_budget(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join((FIXTURES / "prompts.jsonl").read_text().splitlines(keepends=True)[:3]))
    pair = (FIXTURES / "tiny-qwen3-dflash", FIXTURES / "tiny-qwen3", prompts)
    assert "tau loss" in example("verify_with_a_loss_budget.sh", *pair, "60%", cwd=tmp_path)


@pytest.mark.full
def test_deploy(tmp_path: Path) -> None:
    assert "serve.yaml: nothing wrong in what was checked" in example("deploy.sh", cwd=tmp_path)
    written = {path.name for path in (tmp_path / "deployment").rglob("*")}
    assert {"serve.yaml", "kubernetes.yaml", "config.pbtxt"} <= written


DOCUMENTS = [
    *(REPOSITORY / file for file in ("README.md", "CHANGELOG.md", "benchmarks/RESULTS.md", "plugins/README.md")),
    REPOSITORY / ".github" / "CONTRIBUTING.md",
    REPOSITORY / "SECURITY.md",
    REPOSITORY / "tests" / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(?:console|sh|bash|shell)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHELL = {"|", ">", ">>", "2>", "<", "&&", "||", ";", "&"}
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)
EXTRA = re.compile(r"dflash-trt\[([^\]]+)\]")
INLINE_MAKE = re.compile(r"`make ([a-z-]+)")


def documents() -> list[Path]:
    return [path for path in DOCUMENTS if path.exists()]


def commands(document: Path) -> list[list[str]]:
    """The command lines of the shell blocks: prompts and comments removed, continued lines joined."""
    lines = []
    for block in FENCE.findall(document.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line.removeprefix("$ "), comments=True):
                lines.append(list(takewhile(lambda word: word not in SHELL, words)))
    return lines


def anchors(document: Path) -> set[str]:
    """The headings as GitHub spells them in links."""
    titles = HEADING.findall(document.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_relative_links() -> None:
    links = [(document, link) for document in documents() for link in LINK.findall(document.read_text())]
    for document, link in links:
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        path = document.parent / file if file else document
        assert path.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(path), f"{document.name}: {link}"


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_command_lines(document: Path) -> None:
    """Each `dflash-trt ...` line parses: the command, its options and the number of its arguments."""
    for words in commands(document):
        if words[0] == "dflash-trt":
            check(words[1:])


def check(words: list[str]) -> None:
    """Parses as the command line would, without running anything."""
    if words[0].startswith("-"):
        cli.make_context("dflash-trt", words, resilient_parsing=True)
        return
    assert words[0] in cli.commands, words
    if "--help" in words:
        return
    command = cli.commands[words[0]]
    while isinstance(command, click.Group):
        words = words[1:]
        command = command.commands[words[0]]
    with command.make_context(words[0], [word for word in words[1:] if word != "..."]):
        pass


def test_the_check_is_strict() -> None:
    check(["build", "draft", "--target", "t", "-o", "out"])
    for wrong in (["quantize", "draft"], ["inspect", "a", "--nothing"], ["inspect", "a", "b"]):
        with pytest.raises(click.UsageError):
            check(wrong)


def test_the_readme_shows_every_command() -> None:
    text = (REPOSITORY / "README.md").read_text()
    shown = set(re.findall(r"`([a-z-]+)`", text.partition("## Commands")[2]))
    assert {name for name, command in cli.commands.items() if not command.hidden} == shown
    assert text.count("\n") <= 100
    assert len(EXAMPLES) == 3


GENERATED = re.compile(r"<!-- Written by `make .*|<!-- readers: begin.*?readers: end -->", re.DOTALL)


def test_the_docs_are_an_hour_to_read() -> None:
    """Words of README and docs, without the lists that are made from data: what one page says, no other repeats."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    assert sum(len(GENERATED.sub("", page.read_text()).split()) for page in pages) <= 18_500


def test_make_targets_exist() -> None:
    """Each target that a document or .PHONY names has a recipe."""
    text = (REPOSITORY / "Makefile").read_text()
    targets = set(TARGET.findall(text))
    for document in documents():
        blocks = [word for words in commands(document) if words[0] == "make" for word in words[1:]]
        asked = {word for word in blocks if "=" not in word} | set(INLINE_MAKE.findall(document.read_text()))
        assert asked <= targets, f"{document.name}: {asked - targets}"
    phony = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert phony is not None
    without_recipe = {"build", "dynamo"}
    assert (
        set(phony[1].split())
        == {name for name in targets if re.search(rf"^{name}:.*\n\t", text, re.MULTILINE)} | without_recipe
    )


def test_extras_exist() -> None:
    """Each `dflash-trt[EXTRA]` in hints, documents and the Makefile is an extra of pyproject.toml."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [*(REPOSITORY / "dflash_trt").rglob("*.py"), *documents(), REPOSITORY / "Makefile"]
    found = [match for file in files for match in EXTRA.findall(file.read_text()) if "{" not in match]
    assert {extra for match in found for extra in match.split(",")} <= set(extras)
    assert {"run", "serve", "observe"} <= set(found)
    assert set(EXTRAS.values()) <= set(extras)


def test_makefile_commands_parse() -> None:
    """Recipes call dflash-trt too."""
    recipes = (REPOSITORY / "Makefile").read_text().replace("\\\n", " ")
    for line in re.findall(r"^\t.*/dflash-trt (.*)$", recipes, re.MULTILINE):
        check(shlex.split(line))
