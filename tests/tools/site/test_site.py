# SPDX-License-Identifier: Apache-2.0
"""The site's pages: every page is in the navigation, and the references name every command, option and API."""

import re
import tomllib
from pathlib import Path

import click
import pytest

import dflash_trt
from dflash_trt.cli import cli
from tests.paths import REPOSITORY
from tools.site.__main__ import write
from tools.site.command_reference import command_reference
from tools.site.pages import PAGES, page
from tools.site.python_reference import python_reference


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site") / "docs"
    write(directory)
    return directory


def test_every_page_is_in_the_navigation(site: Path) -> None:
    project = tomllib.loads((REPOSITORY / "zensical.toml").read_text())["project"]
    listed = [name for section in project["nav"] for names in section.values() for name in names]
    assert sorted(listed) == sorted(file.name for file in site.glob("*.md"))
    named = {project["theme"]["logo"], *project["extra_css"], *project["extra_javascript"]}
    assert named <= {file.name for file in site.iterdir()}


def test_every_page_names_its_version_and_source(site: Path) -> None:
    for file in site.glob("*.md"):
        assert f'class="source">dflash-trt {dflash_trt.__version__}, <code>' in file.read_text(), file.name


def test_links_lead_to_pages_or_name_the_source(site: Path) -> None:
    start = (site / "index.md").read_text()
    assert "](start.md)" in start
    assert "](results.md)" in start
    assert "examples (`docs/examples`)" in start
    assert "[`serve-config`](commands.md#serve-config)" in start
    for file in site.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", file.read_text()):
            assert (site / target).is_file(), f"{file.name}: {target}"


@pytest.mark.parametrize("source", PAGES)
def test_a_page_keeps_its_words(source: str) -> None:
    headings = re.findall(r"^#+ .*$", (REPOSITORY / source).read_text(), re.MULTILINE)
    assert re.findall(r"^#+ .*$", page(source), re.MULTILINE) == headings


def commands(group: click.Group, path: str = "") -> dict[str, click.Command]:
    """All visible commands, by their words."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        if not command.hidden:
            found[f"{path}{name}"] = command
            if isinstance(command, click.Group):
                found |= commands(command, f"{path}{name} ")
    return found


@pytest.mark.parametrize(("words", "command"), commands(cli).items(), ids=lambda given: str(given))
def test_every_command_and_option(words: str, command: click.Command) -> None:
    section = re.split(rf"^#+ dflash-trt {words} {{ #{words.replace(' ', '-')} }}$", command_reference(), flags=re.M)
    assert len(section) == 2
    text = re.split(r"^#+ ", section[1], flags=re.MULTILINE)[0]
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert any(re.search(rf"^`[^`]*{re.escape(name)}\b", text, re.M) for name in parameter.opts), parameter.opts
    assert "\b" not in text
    assert "\\<" not in text


def test_every_export() -> None:
    text = python_reference()
    for name in set(dflash_trt.__all__) - {"__version__", "LLM"}:
        assert re.search(rf"^::: dflash_trt\.[\w.]+\.{name}$", text, re.MULTILINE), name
    assert "    target: str | Path | None = None,\n" in text
    assert "::: dflash_trt.llm.LLM.generate\n" in text
