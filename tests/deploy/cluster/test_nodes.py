# SPDX-License-Identifier: Apache-2.0
"""vLLM's and SGLang's own commands on several nodes: the scripts run with programs that write down their words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dflash_trt.deploy.flags import parse_arguments
from dflash_trt.deploy.real_classes import check_with_package
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.schema_check import check_schema
from tests.cli.commands import run
from tests.deploy.deployments import BUILD_CONFIGS, shellcheck
from tests.deploy.test_schema import needs

RECORD = f"""#!{sys.executable}
import json, os, sys
rank = next(os.environ[name] for name in ("SLURM_NODEID", "LWS_WORKER_INDEX", "NODE_RANK") if name in os.environ)
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([rank, *sys.argv[1:]]) + "\\n")
"""
SRUN = """#!/bin/bash
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
    for name, text in {PROGRAMS[runtime]: RECORD, "srun": SRUN, "scontrol": scontrol}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    record = directory / "record"
    record.unlink(missing_ok=True)
    variables = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record)} | environment
    subprocess.run(["bash", "-c", script], env=variables, check=True, cwd=directory)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    start = {"vllm": 1, "sglang": 2}[runtime]  # behind `serve`, or `-m sglang.launch_server`
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
