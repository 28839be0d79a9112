# SPDX-License-Identifier: Apache-2.0
"""The steps that `serve-config -o` prints are run, line by line, up to where a GPU begins.

A stand-in for Docker checks images, mounts, variables and paths, and runs the container's command here: `dflash-trt
build --plans-for` until it asks for the GPU, trtllm-serve with the stand-in for TensorRT-LLM.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_trt.deploy.steps import OWN_IMAGE, SOURCE, TENSORRT
from dflash_trt.engine.manifest import read_manifest
from tests.cli.commands import run
from tests.paths import FIXTURES, REPOSITORY
from tests.trtllm.fake_package import write_package, write_server
from tests.waiting import PATIENCE

DOCKER = Path(__file__).parent / "stand_in_docker.py"
PYTHON = f"#!/bin/bash\nexec {sys.executable} "
PROGRAMS = {
    "docker": f'{PYTHON}{DOCKER} "$@"\n',
    "dflash-trt": f'#!/bin/bash\n[[ $1 == doctor ]] || exec {sys.executable} -m dflash_trt "$@"\necho "$@"\n',
    "hf": "#!/bin/bash\n[[ $1 == download && $# == 2 ]]\n",
    "curl": '#!/bin/bash\necho \'{"data": [{"id": "m"}]}\'\n',
}

SERVER = """
import json, sys

def main():
    from tensorrt_llm._torch.models.modeling_utils import get_registered_draft_model_builder
    from tensorrt_llm._torch.speculative.interface import SpeculativeDecodingMode

    builder = get_registered_draft_model_builder(SpeculativeDecodingMode.DFLASH).__module__
    file = sys.argv[sys.argv.index("--config") + 1]
    print(json.dumps([builder, sys.argv, open(file).read()]))
"""
OURS = "dflash_trt.trtllm.registration"


def walk(steps: str, place: Path, programs: Path, **environment: str) -> list[dict[str, object]]:
    """Run the steps in `place`; what the stand-in for Docker noted."""
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    write_server(write_package(programs))
    (programs / "tensorrt_llm" / "commands.py").write_text(SERVER)
    (programs / "tensorrt.py").write_text(f'__version__ = "{TENSORRT}"\n')
    (programs / "notes").touch()
    variables = os.environ | {
        "PATH": f"{programs}:{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": f"{programs}:{REPOSITORY}",
        "NOTES": str(programs / "notes"), SOURCE: str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(programs), **environment,
    }  # fmt: skip
    result = subprocess.run(
        ["bash", "-eu", "-o", "pipefail"], input=steps, cwd=place, env=variables, capture_output=True, text=True,
        timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "doctor http://127.0.0.1:8000" in result.stdout
    return [json.loads(line) for line in (programs / "notes").read_text().splitlines()]


def deployment(place: Path, pair: str = "tiny-gpt-oss", **changes: object) -> Path:
    """A deployment of two fixtures, which lie beside the directory `place`."""
    for name in (pair, f"{pair}-dflash"):
        shutil.copytree(FIXTURES / name, place.parent / name)
    file = place / "mine.yaml"
    document = {
        "description": "fixtures", "target": f"../{pair}", "draft": f"../{pair}-dflash", "gpus": "b300x2",
        "purpose": "latency",
    }  # fmt: skip
    file.write_text(yaml.safe_dump(document | changes))
    return file


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (place := tmp_path / "my work").mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("output", ["../serve it.yaml", pytest.param("serve.yaml", marks=pytest.mark.full)])
def test_engine_mode(output: str, place: Path) -> None:
    """Image, plans in it, server in it: one TensorRT for the plans."""
    file = deployment(place, mode="engine", recipe="nvfp4")
    written = run("serve-config", file.name, "--runtime", "trtllm", "-o", output)
    assert written.returncode == 0, written.stderr
    image, plans, server, *_ = walk(written.stdout, place, place.parent / "programs")
    assert image == {"built": OWN_IMAGE, "tensorrt": TENSORRT}
    assert plans["stopped_at"] == "the GPU"
    assert read_manifest(place / "mine").quantization.modules
    builder, arguments, config = json.loads(str(server["printed"]))
    assert builder == OURS
    assert arguments[1] == "../tiny-gpt-oss"
    assert yaml.safe_load(config)["speculative_config"]["speculative_model"] == "mine"


@pytest.mark.full
def test_an_engine_that_is_elsewhere(place: Path) -> None:
    """The plans are built in a directory that is not below the one where the steps run."""
    file = deployment(place, mode="engine")
    assert run("build", file, "-o", place.parent / "engine").returncode == 0
    written = run("serve-config", file.name, "--draft", "../engine", "--runtime", "trtllm", "-o", "serve.yaml")
    _, plans, server, *_ = walk(written.stdout, place, place.parent / "programs")
    assert plans["stopped_at"] == "the GPU"
    assert json.loads(str(server["printed"]))[0] == OURS


@pytest.mark.parametrize("runtime", ["trtllm", "vllm", "sglang"])
def test_native_mode(runtime: str, place: Path) -> None:
    """Models that lie outside the directory are mounted, too."""
    file = deployment(place, "tiny-qwen3", recipe="nvfp4-native" if runtime == "trtllm" else "bf16")
    written = run("serve-config", file.name, "--runtime", runtime, "-o", "serve.yaml")
    assert written.returncode == 0, written.stderr
    server, *_ = walk(written.stdout, place, place.parent / "programs")
    assert str(server["image"]).partition(":")[0] in (
        "nvcr.io/nvidia/tensorrt-llm/release", "vllm/vllm-openai", "lmsysorg/sglang"
    )  # fmt: skip


def test_one_tensorrt_is_named_everywhere() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    dockerfile = (REPOSITORY / "docs" / "deploy" / "trtllm.Dockerfile").read_text()
    pins = [re.findall(r'"tensorrt(?:-cu13)?[>=]=([\d.]+)"', text) for text in (project, dockerfile)]
    assert pins == [[TENSORRT] * 2, [TENSORRT]]
