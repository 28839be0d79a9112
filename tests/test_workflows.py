# SPDX-License-Identifier: Apache-2.0
"""Workflows, issue forms and hooks are YAML that calls existing targets; every script of ours starts."""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner

from tests.paths import REPOSITORY

FILES = [file for room in ("benchmarks", "tools") for file in sorted((REPOSITORY / room).rglob("*.py"))]
NAMES = [".".join(file.relative_to(REPOSITORY).with_suffix("").parts) for file in FILES]


@pytest.mark.parametrize("name", NAMES)
def test_starts(name: str) -> None:
    module = import_module(name)
    for command in vars(module).values():
        if isinstance(command, click.Command):
            result = CliRunner().invoke(command, ["--help"])
            assert (result.exit_code, result.output[:6]) == (0, "Usage:")


FORMS = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


def make_targets(workflow: Path) -> list[str]:
    return [target for step in steps(workflow) for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflow(workflow: Path) -> None:
    document = yaml.safe_load(workflow.read_text())
    assert document["permissions"] == {"contents": "read"}
    assert "concurrency" in document
    assert set(make_targets(workflow)) <= TARGETS
    for step in steps(workflow):
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "actions/checkout@v1")), step


def test_ci_is_what_lands() -> None:
    """GitHub runs the commands of .ci/run, on every Python that pyproject.toml builds wheels for."""
    ci = REPOSITORY / ".github" / "workflows" / "ci.yml"
    assert make_targets(ci) == re.findall(r"^make (\S+)", (REPOSITORY / ".ci" / "run").read_text(), re.MULTILINE)
    pythons = yaml.safe_load(ci.read_text())["jobs"]["test"]["strategy"]["matrix"]["python"]
    built = re.search(r"cp31\{([\d,]+)\}", (REPOSITORY / "pyproject.toml").read_text())
    assert built is not None
    assert pythons == [f"3.1{minor}" for minor in built[1].split(",")]


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_issue_form(form: Path) -> None:
    document = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(document)
    identifiers = [field["id"] for field in document["body"]]
    assert len(set(identifiers)) == len(identifiers)


def test_pre_commit_runs_the_pinned_hooks() -> None:
    repositories = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"] for repository in repositories for hook in repository["hooks"]}
    assert {"ruff-check", "ruff-format", "clang-format", "check-yaml", "end-of-file-fixer"} <= hooks
    assert all(repository["rev"].startswith("v") for repository in repositories)
