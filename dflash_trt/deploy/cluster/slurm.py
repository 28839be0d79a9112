# SPDX-License-Identifier: Apache-2.0
"""An sbatch script: a server on all nodes of a job, in containers of pyxis or as the nodes have it."""

from __future__ import annotations

import re

from dflash_trt.deploy.cluster.cluster_server import CONFIG, NO_IMAGE, ClusterServer, node_command
from dflash_trt.deploy.cluster.template import Text, shell_text
from dflash_trt.deploy.schema import PACKAGES
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import command_line

PREFIX = "sbatch"
SBATCH_OPTIONS = {"exclusive": "", "mem": "0", "output": "%x-%j.log"}
"""Whole nodes: without, a cluster that hands out cores gives a task one of them and its share of the memory."""
SIZES = ("nodes", "ntasks-per-node", "gpus-per-node", "job-name")
VALUE = re.compile(r"[\w./:,=@%+*\[\]-]+", re.ASCII)


def sbatch_options(given: dict[str, str]) -> dict[str, str]:
    """sbatch's options that `--set sbatch.OPTION=VALUE` gives, over the usual ones; `no` leaves one out.

    Raises ConfigError for other values, and for options that the deployment decides.
    """
    for option, value in given.items():
        if VALUE.fullmatch(value) is None:
            raise ConfigError(f"--set {PREFIX}.{option}: expected one word without quotes, found {value!r}")
        if option in SIZES:
            raise ConfigError(f"--set {PREFIX}.{option}: the deployment decides {option}", hint="change its gpus")
    return {option: value for option, value in (SBATCH_OPTIONS | given).items() if value != "no"}


def sbatch_script(server: ClusterServer) -> str:
    """The script, in which a task is a rank of TensorRT-LLM, or a node of vLLM and SGLang, which start their own ranks.

    trtllm-llmapi-launch runs the command on rank 0, and workers on the others. Raises ConfigError for replicas, and for
    white space in TensorRT-LLM's command, at which its launcher splits it.
    """
    if server.replicas != 1:
        raise ConfigError("--replicas: expected 1 for a Slurm job, which is one server", hint="submit it several times")
    words, options = server.words(CONFIG), SBATCH_OPTIONS if server.sbatch is None else server.sbatch
    values: dict[str, str | int] = {
        "head": Text(server.head),
        "address": Text(f"{words[words.index('--host') + 1]}:{server.port}"),
        "name": server.name,
        "nodes": server.nodes,
        "gpus_per_node": server.gpus_per_node,
        "models": server.models,
        "sbatch": Text("\n".join(f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in options.items())),
    }
    if server.config is None:
        command = ["bash", "-c", node_command(server, rank="SLURM_NODEID", leader="leader")]
        needs, place = _place(server, f"{server.models}:{server.models}")
        return shell_text("slurm_nodes.sh", **values, needs=needs, place=place, command=command)
    if broken := [word for word in words if word.split() != [word]]:
        raise ConfigError(f"--launcher slurm: expected no white space in the command, found {broken[0]!r}")
    file = '"$config"' if server.image == NO_IMAGE else CONFIG
    ranks = f"{command_line(['trtllm-llmapi-launch', *server.command])} {file}"
    needs, place = _place(server, f'"{server.models}:{server.models},$config:{CONFIG}"')
    config = Text(server.config.rstrip("\n"))
    return shell_text("slurm_ranks.sh", **values, needs=needs, place=place, config=config, command=Text(ranks))


def plans_srun(server: ClusterServer) -> str:
    """Start of the line that builds engine mode's plans on one of the GPUs, where the ranks will run."""
    _, place = _place(server, f"{server.models}:{server.models}")
    return f"srun --nodes=1 --ntasks=1 --gpus-per-node=1 \\\n{place}\n "


def _place(server: ClusterServer, mounts: str) -> tuple[Text, Text]:
    """Software that the nodes need, and srun's options for the place where the command runs."""
    if server.image == NO_IMAGE:
        return Text(f"{PACKAGES[server.runtime]} on every node"), Text(f"  --chdir={server.models} \\")
    options = (
        f"--container-image={command_line([_enroot_image(server.image)])}",
        f"--container-mounts={mounts}",
        f"--container-workdir={server.models}",
    )
    return Text("pyxis"), Text("\n".join(f"  {option} \\" for option in options))


def _enroot_image(image: str) -> str:
    """The image as [REGISTRY#]IMAGE, which every release of enroot reads; a squashfs file stays one."""
    registry, slash, rest = image.partition("/")
    is_registry = "." in registry.lstrip(".") or ":" in registry or registry == "localhost"
    return f"{registry}#{rest}" if slash and is_registry and "#" not in image else image
