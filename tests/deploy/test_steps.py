# SPDX-License-Identifier: Apache-2.0
"""The steps that `serve-config -o` prints are a valid shell script, in which each file is there before it is read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from dflash_trt.deploy.cluster.dynamo_graph import RUNTIMES as DYNAMO
from dflash_trt.deploy.deployment_file import shipped_deployments
from dflash_trt.deploy.steps import CONFIGURATION
from dflash_trt.errors import BuildError
from tests.cli.commands import run_here
from tests.deploy.deployments import resolved, shellcheck

NAMES = list(shipped_deployments())
SOURCES = [(name, runtime) for name in NAMES for runtime in resolved(name).runtimes]
REPOSITORY_ID = re.compile(r"[\w.-]+/[\w.-]+")


def steps(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Output of serve-config; the configuration is in FILE."""
    run_here("serve-config", *words, "-o", "FILE")
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


NODES = "gpt-oss-120b.gb10x2.latency"


@pytest.mark.parametrize(
    "name", ["qwen3-4b.h200x1.latency", "gpt-oss-120b.b300x8.latency", "gpt-oss-120b.b300x8.nvfp4", NODES]
)
def test_every_kind_of_server_has_valid_steps(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [("--runtime", runtime) for runtime in resolved(name).runtimes]
    is_engine = resolved(name).mode == "engine"
    image = ("--image", "registry/image:1") if is_engine else ()
    first = resolved(name).runtimes[0]
    kinds += [("--runtime", first, "--launcher", launcher, *image) for launcher in ("slurm", "kubernetes")]
    graphs = DYNAMO if name != NODES and not is_engine else ()
    kinds += [("--runtime", runtime, "--image", "registry/image:1") for runtime in graphs]
    scripts = []
    for number, kind in enumerate(kinds):
        script = Path(f"{number}.sh")
        script.write_text(steps(capsys, name, *kind))
        service = re.search(r"port-forward service/(\S+)", script.read_text())
        assert service is None or f"Service {service[1]}\n" in Path("FILE").read_text()  # in its head
        assert 'until curl -fsS "$url/health" > /dev/null' in script.read_text()
        assert "doctor" in script.read_text()
        assert "Stop it" in script.read_text()
        scripts.append(script)
    assert shellcheck(*scripts) == ""


@pytest.mark.full
def test_all_that_is_written_is_valid_shell_and_passes_its_check(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps, commands and sbatch scripts of every deployment and runtime, in one run of shellcheck."""
    scripts = []
    for name, runtime in SOURCES:
        for kind in ((), ("--launcher", "slurm", "--image", "registry/image:1")):
            place = Path(f"{name}.{runtime}.{len(kind)}")
            place.with_suffix(".sh").write_text(steps(capsys, name, "--runtime", runtime, *kind))
            scripts.append(place.with_suffix(".sh"))
            Path("FILE").rename(place)
            scripts += [place] if kind or runtime != "trtllm" else []
            if kind:
                continue
            run_here("serve-config", name, "--runtime", runtime, "--check", place, "--json")
            found = json.loads(capsys.readouterr().out)["findings"]
            assert {each["severity"] for each in found} <= {"accepted", "not checked"}, (name, runtime, found)
    assert len(scripts) > 3 * len(NAMES)
    assert shellcheck(*scripts) == ""


@pytest.mark.parametrize(("name", "runtime"), [
    each if number % 12 == 0 else pytest.param(*each, marks=pytest.mark.full) for number, each in enumerate(SOURCES)
])  # fmt: skip
def test_what_the_server_reads_was_brought_or_made_before(
    name: str, runtime: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = steps(capsys, name, "--runtime", runtime)
    brought = set(re.findall(r"^hf download (\S+)$", script, re.M))
    made = set(re.findall(r"^dflash-trt quantize .* -o (\S+)$", script, re.M))
    made |= set(re.findall(r"^dflash-trt build ([^-]\S*)$", script, re.M))
    text = Path("FILE").read_text()
    read = {resolved(name).target}
    if runtime == "trtllm":
        read.add(yaml.safe_load(text)["speculative_config"]["speculative_model"])
    else:
        read |= set(re.findall(r'"model": "([^"]+)"|--speculative-draft-model-path (\S+)', text)[0]) - {""}
    assert read == brought | made
    assert all(REPOSITORY_ID.fullmatch(repository) for repository in brought)
    assert "FILE" in script


@pytest.mark.parametrize("below", [True, False])
def test_a_container_sees_the_configuration(below: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where it lies elsewhere than in this directory, which is mounted as it is, the file is mounted, too."""
    file = Path("serve.yaml") if below else tmp_path / "serve.yaml"
    run_here("serve-config", "gpt-oss-120b.b300x8.latency", "--runtime", "trtllm", "-o", file)
    written = capsys.readouterr().out
    assert (f"--volume {tmp_path}/serve.yaml:{tmp_path}/serve.yaml:ro" in written) is not below
    assert f"--config {file}\n" in written


def test_only_a_configuration_of_ours_is_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    steps(capsys, "qwen3-8b.h200x1.latency", "--runtime", "vllm")
    steps(capsys, "gpt-oss-120b.b300x8.latency", "--runtime", "trtllm", "--launcher", "slurm")
    assert CONFIGURATION.recognizes(Path("FILE"))
    Path("FILE").write_text("all that I know\n")
    with pytest.raises(BuildError, match="already exists and is not a configuration that dflash-trt wrote"):
        steps(capsys, "qwen3-8b.h200x1.latency", "--runtime", "vllm")
    assert Path("FILE").read_text() == "all that I know\n"
    assert capsys.readouterr().out == ""
