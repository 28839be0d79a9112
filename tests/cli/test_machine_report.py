# SPDX-License-Identifier: Apache-2.0
"""What doctor finds of packages and tools, on machines that this one is not."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from dflash_trt.cli import machine_report
from dflash_trt.cli.machine_report import MachineFinding, examine
from dflash_trt.engine.plans import tensorrt_api
from dflash_trt.trtllm import contract
from tests.contract.recorder import VERSIONS
from tests.paths import REPOSITORY


def finding(name: str) -> MachineFinding:
    (found,) = [finding for finding in examine() if finding.name == name]
    return found


def program(directory: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a shell script `name` first on PATH."""
    (directory / name).write_text(script)
    (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")


def test_packages_that_are_there() -> None:
    assert finding("onnx").found is not None
    assert finding("torch").found is not None


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine_report.PACKAGES, "no_such_package", (("everything",), "pip install no_such_package"))
    missing = finding("no_such_package")
    assert (missing.found, missing.needed_for) == (None, ("everything",))
    assert missing.fix == "pip install no_such_package"


@pytest.mark.parametrize(
    ("distribution", "found"), [("tensorrt_cu13-11.4.0.106", "11.4.0.106"), (None, "of unknown version")]
)
def test_tensorrt_is_what_brings_its_module(
    distribution: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tensorrt.py").touch()
    if distribution:
        information = tmp_path / f"{distribution}.dist-info"
        information.mkdir()
        name, _, version = distribution.partition("-")
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (information / "top_level.txt").write_text("tensorrt\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert finding("tensorrt").found == found


def test_every_missing_thing_has_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_report, "package_version", lambda name: None)
    monkeypatch.setattr(machine_report.shutil, "which", lambda name: None)
    missing = [finding for finding in examine() if finding.found is None]
    assert {"onnx", "torch", "tensorrt", "c++", "nvcc"} <= {finding.name for finding in missing}
    assert all(finding.fix and finding.needed_for for finding in missing)


def test_extras_bring_what_doctor_says() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for package, (_, fix) in machine_report.PACKAGES.items():
        if "dflash-trt[" in fix:
            extra = fix.partition("[")[2].partition("]")[0]
            listed = [re.split(r"[=>\[]", requirement)[0] for requirement in project["optional-dependencies"][extra]]
            assert package in listed


def test_extras_of_the_gpu_machine_are_the_releases_that_were_read() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["tensorrt"] == [f"tensorrt>={'.'.join(map(str, tensorrt_api.OLDEST))}"]
    release, tensorrt = (requirement.partition("==")[::2] for requirement in extras["trtllm"])
    assert release == ("tensorrt_llm", contract.RELEASES[-1])
    assert tensorrt == ("tensorrt-cu13", VERSIONS[-1])
    assert {"tensorrt", "tensorrt_llm"} <= {
        name for name, (_, fix) in machine_report.PACKAGES.items() if "dflash-trt[" in fix
    }


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("#!/bin/sh\necho 'c++ (Debian) 12.2.0'\necho 'Copyright (C) 2022'\n", "c++ (Debian) 12.2.0"),
        ("#!/bin/sh\necho built on 2025\necho 'tools, release 13.0, V13.0.88'\n", "tools, release 13.0, V13.0.88"),
        ("#!/bin/sh\nexit 1\n", "PATH/c++"),
        ("#!/bin/sh\nprintf '\\377 12.2'\n", "\ufffd 12.2"),
        ("\x7fELF of another machine", "PATH/c++"),
    ],
)
def test_tools(script: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "c++", script, monkeypatch)
    assert finding("c++").found == found.replace("PATH", str(tmp_path))


def test_a_tool_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 30)

    program(tmp_path, "c++", "#!/bin/sh\n", monkeypatch)
    monkeypatch.setattr(machine_report.subprocess, "run", hang)
    assert finding("c++").found == str(tmp_path / "c++")
