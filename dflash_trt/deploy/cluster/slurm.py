# SPDX-License-Identifier: Apache-2.0
"""An sbatch script: trtllm-serve on all ranks of a job, in containers of pyxis or as the nodes have it."""

from __future__ import annotations

from dflash_trt.deploy.cluster.cluster_server import CONFIG, NO_IMAGE, ClusterServer
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import command_line


def sbatch_script(server: ClusterServer) -> str:
    """One task is one rank; trtllm-llmapi-launch runs the command on rank 0, and workers on the others.

    Raises ConfigError for another runtime, for replicas, and for white space in the command, at which that launcher
    splits it.
    """
    if server.runtime != "trtllm":
        raise ConfigError(f"--launcher slurm: expected --runtime trtllm, found {server.runtime}")
    if server.replicas != 1:
        raise ConfigError("--replicas: expected 1 for a Slurm job, which is one server", hint="submit it several times")
    if broken := [word for word in server.words if word.split() != [word]]:
        raise ConfigError(f"--launcher slurm: expected no white space in the command, found {broken[0]!r}")
    assert server.config is not None
    command = command_line(["trtllm-llmapi-launch", *server.words])
    if server.image == NO_IMAGE:
        needs, place = "TensorRT-LLM on every node", f"  --chdir={server.models} \\\n"
        command = command.replace(CONFIG, '"$config"')
    else:
        needs = "pyxis"
        place = f"""  --container-image={command_line([_enroot_image(server.image)])} \\
  --container-mounts="{server.models}:{server.models},$config:{CONFIG}" \\
  --container-workdir={server.models} \\
"""
    host = server.words[server.words.index("--host") + 1]
    return f"""#!/bin/bash
{server.head}
# sbatch THIS_FILE, from a directory that every node sees. Needs {needs}, and Slurm built with PMIx.
# Answers on {host}:{server.port} of the job's first node; serve-config --host says where else.
#SBATCH --job-name={server.name}
#SBATCH --nodes={server.nodes}
#SBATCH --ntasks-per-node={server.gpus_per_node}
#SBATCH --gpus-per-node={server.gpus_per_node}
#SBATCH --output=%x-%j.log
set -euo pipefail

config="$SLURM_SUBMIT_DIR/{server.name}-$SLURM_JOB_ID.yaml"
if [[ $config == *[,:[:space:]]* ]]; then
  echo "error: expected a path without , : and spaces, at which it is split, found $SLURM_SUBMIT_DIR" >&2
  exit 1
fi
trap 'rm -f "$config"' EXIT
cat > "$config" <<'END_OF_CONFIG'
{server.config}END_OF_CONFIG

# Weights are read from {server.models}, nothing is downloaded.
export HF_HOME={server.models} HF_HUB_OFFLINE=1

srun --mpi=pmix \\
{place}  {command}
"""


def _enroot_image(image: str) -> str:
    """The image as [REGISTRY#]IMAGE, which every release of enroot reads; a squashfs file stays one."""
    registry, slash, rest = image.partition("/")
    is_registry = "." in registry.lstrip(".") or ":" in registry or registry == "localhost"
    return f"{registry}#{rest}" if slash and is_registry and "#" not in image else image
