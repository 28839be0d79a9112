# SPDX-License-Identifier: Apache-2.0
"""An sbatch script: a server on all nodes of a job, in containers of pyxis or as the nodes have it."""

from __future__ import annotations

from dflash_trt.deploy.cluster.cluster_server import CONFIG, NO_IMAGE, ClusterServer, node_command
from dflash_trt.deploy.schema import PACKAGES
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import command_line


def sbatch_script(server: ClusterServer) -> str:
    """TensorRT-LLM: a task is a rank; trtllm-llmapi-launch runs the command on rank 0, and workers on the others. vLLM
    and SGLang: a task is a node, and starts the ranks of its GPUs.

    Raises ConfigError for replicas, and for white space in TensorRT-LLM's command, at which its launcher splits it.
    """
    if server.replicas != 1:
        raise ConfigError("--replicas: expected 1 for a Slurm job, which is one server", hint="submit it several times")
    return _ranks(server) if server.runtime == "trtllm" else _nodes(server)


def _ranks(server: ClusterServer) -> str:
    if broken := [word for word in server.words if word.split() != [word]]:
        raise ConfigError(f"--launcher slurm: expected no white space in the command, found {broken[0]!r}")
    assert server.config is not None
    command = command_line(["trtllm-llmapi-launch", *server.words])
    if server.image == NO_IMAGE:
        command = command.replace(CONFIG, '"$config"')
    needs, place = _place(server, f'"{server.models}:{server.models},$config:{CONFIG}"')
    where = f", from a directory that every node sees. Needs {needs}, and Slurm built with PMIx"
    return f"""{_head(server, where, server.gpus_per_node)}
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


def _nodes(server: ClusterServer) -> str:
    needs, place = _place(server, f"{server.models}:{server.models}")
    command = command_line(["bash", "-c", node_command(server, rank="SLURM_NODEID", leader="leader")])
    return f"""{_head(server, f". Needs {needs}", 1)}
# Weights are read from {server.models}, nothing is downloaded.
export HF_HOME={server.models} HF_HUB_OFFLINE=1
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export leader="${{nodes%%$'\\n'*}}"

# shellcheck disable=SC2016 # each node fills in its own rank
srun \\
{place}  {command}
"""


def _place(server: ClusterServer, mounts: str) -> tuple[str, str]:
    """What the nodes need, and srun's options that say where it runs."""
    if server.image == NO_IMAGE:
        return f"{PACKAGES[server.runtime]} on every node", f"  --chdir={server.models} \\\n"
    return (
        "pyxis",
        f"""  --container-image={command_line([_enroot_image(server.image)])} \\
  --container-mounts={mounts} \\
  --container-workdir={server.models} \\
""",
    )


def _head(server: ClusterServer, where: str, tasks: int) -> str:
    host = server.words[server.words.index("--host") + 1]
    return f"""#!/bin/bash
{server.head}
# sbatch THIS_FILE{where}.
# Answers on {host}:{server.port} of the job's first node; serve-config --host says where else.
#SBATCH --job-name={server.name}
#SBATCH --nodes={server.nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --gpus-per-node={server.gpus_per_node}
#SBATCH --output=%x-%j.log
set -euo pipefail
"""


def _enroot_image(image: str) -> str:
    """The image as [REGISTRY#]IMAGE, which every release of enroot reads; a squashfs file stays one."""
    registry, slash, rest = image.partition("/")
    is_registry = "." in registry.lstrip(".") or ":" in registry or registry == "localhost"
    return f"{registry}#{rest}" if slash and is_registry and "#" not in image else image
