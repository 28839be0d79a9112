# SPDX-License-Identifier: Apache-2.0
"""sbatch scripts ask for whole nodes, and get them from a real Slurm on this machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.servers.local_server import free_port
from tests.cli.commands import run, run_here
from tests.waiting import PATIENCE

NAME = "gpt-oss-120b.h200x8.latency"
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place}/munge.socket
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
SlurmctldLogFile={place}/slurmctld.log
SlurmdLogFile={place}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=1000
MailProg=/bin/true
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 RealMemory=4000
PartitionName=all Nodes={host} Default=YES
"""
SERVER = '#!/bin/bash\nscontrol show job "$SLURM_JOB_ID"\n'


def script(*options: str) -> str:
    result = run("serve-config", NAME, "--launcher", "slurm", *options)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("runtime", ["trtllm", "vllm", "sglang"])
def test_whole_nodes_unless_told(runtime: str) -> None:
    asked = re.findall("^#SBATCH --(.*)$", script("--runtime", runtime), re.M)
    assert asked[-3:] == ["exclusive", "mem=0", "output=%x-%j.log"]
    options = ("exclusive=no", "mem=200G", "cpus-per-task=14", "partition=gpu")
    changed = script("--runtime", runtime, *(word for each in options for word in ("--set", f"sbatch.{each}")))
    assert re.findall("^#SBATCH --(.*)$", changed, re.M)[-4:] == [
        "mem=200G", "output=%x-%j.log", "cpus-per-task=14", "partition=gpu"
    ]  # fmt: skip
    none = (word for each in ("exclusive", "mem", "output") for word in ("--set", f"sbatch.{each}=no"))
    assert re.findall("^#SBATCH --([^=]*)", script("--runtime", runtime, *none), re.M) == [
        "job-name", "nodes", "ntasks-per-node", "gpus-per-node"
    ]  # fmt: skip


@pytest.mark.parametrize("setting", ["nodes=2", "mem", "mem=", "comment=a b", "x;y=1", "Mem=1", "mem=1\nreboot"])
def test_settings_that_sbatch_does_not_get(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"^--set sbatch"):
        run_here("serve-config", NAME, "--launcher", "slurm", "--runtime", "vllm", "--set", f"sbatch.{setting}")


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Variables for the commands of a Slurm on loopback, whose one node has 16 cores and 4,000 MB."""
    if os.geteuid() or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))):
        pytest.skip("needs root and Slurm: apt-get install slurmctld slurmd slurm-client munge")
    host = os.uname().nodename.partition(".")[0]
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurm.conf").write_text(CONF.format(host=host, ports=(free_port(), free_port()), place=tmp_path))
    (tmp_path / "key").write_bytes(os.urandom(128))
    (tmp_path / "key").chmod(0o400)
    variables = os.environ | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    files = (f"--{name}={tmp_path / f'munge.{end}'}" for name, end in (
        ("socket", "socket"), ("log-file", "log"), ("pid-file", "pid"), ("seed-file", "seed")
    ))  # fmt: skip
    subprocess.run(["munged", "--force", f"--key-file={tmp_path / 'key'}", *files], check=True)
    daemons = [subprocess.Popen(["slurmctld", "-D"], env=variables)]
    try:
        daemons.append(subprocess.Popen(["slurmd", "-D", "-N", host], env=variables))
        deadline = time.monotonic() + PATIENCE
        while "idle" not in output(variables, "sinfo", "--noheader", "--format", "%T"):
            assert time.monotonic() < deadline, (tmp_path / "slurmctld.log").read_text()
            time.sleep(0.2)
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(PATIENCE)
        os.kill(int((tmp_path / "munge.pid").read_text()), 15)


def output(variables: dict[str, str], *command: str) -> str:
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False).stdout


@pytest.mark.full
def test_a_real_slurm_gives_the_server_the_node(slurm: dict[str, str], tmp_path: Path) -> None:
    """GPUs aside, which this node does not have; without --exclusive and --mem=0 it gets a core and 1,000 MB."""
    (models := tmp_path / "models").mkdir()
    (tmp_path / "vllm").write_text(SERVER)
    (tmp_path / "vllm").chmod(0o755)
    variables = slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    given = []
    for options in ((), ("--set", "sbatch.exclusive=no", "--set", "sbatch.mem=no")):
        text = script("--runtime", "vllm", "--image", "none", "--models", str(models), *options)
        (tmp_path / "job.sh").write_text(re.sub("#SBATCH --gpus.*\n", "", text))
        job = ["sbatch", "--wait", f"--output={tmp_path / 'log'}", str(tmp_path / "job.sh")]
        result = subprocess.run(
            job, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert result.returncode == 0, (tmp_path / "log").read_text()
        given.append(re.findall(r"TRES=cpu=(\d+),mem=(\d+)M", (tmp_path / "log").read_text())[0])
    assert given == [("16", "4000"), ("1", "1000")]
