# SPDX-License-Identifier: Apache-2.0
"""One server of a deployment, for any cluster, and the command of one node of several: the same on each, but for rank.

vLLM 0.33.0 (engine/arg_utils.py, config/parallel.py): --nnodes, --node-rank, --master-addr, and --headless where no
HTTP is served. SGLang 0.5.23 (srt/arg_groups/fields/parallel.py): --nnodes, --node-rank, --dist-init-addr.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import msgspec

from dflash_trt.deploy.cluster.pod_options import PodOptions
from dflash_trt.deploy.render import Rendered
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import command_line

CONFIG = "/config/serve.yaml"
"""Where the YAML of `serve-config --runtime trtllm` lies in a container."""
IMAGES = {
    "trtllm": "nvcr.io/nvidia/tensorrt-llm/release:{}",
    "vllm": "vllm/vllm-openai:v{}",
    "sglang": "lmsysorg/sglang:v{}",
}
NO_IMAGE = "none"
"""Value of --image that runs what the nodes have installed; pods cannot."""
MODELS = re.compile(r"/[\w./-]+")
IMAGE = re.compile(r"[\w./][\w./:@#+-]*")
MAX_NAME = 40
"""Maximum length of a name; operators append to it, and Kubernetes allows 63 characters."""


class ClusterServer(Rendered, frozen=True, kw_only=True):
    """A rendered deployment as servers of a cluster, whose containers find the YAML of trtllm-serve in CONFIG."""

    name: str
    """A DNS label."""
    image: str
    models: str
    """Directory of the weights, mounted into the container at the same path; its Hugging Face cache, too."""
    replicas: int
    sbatch: dict[str, str] | None = None
    """Options of sbatch beside the sizes, for Slurm; None for the usual ones."""
    pod: PodOptions = PodOptions()
    """Options of pods, for Kubernetes."""

    @property
    def config(self) -> str | None:
        """YAML of trtllm-serve; the other runtimes have flags alone."""
        return self.text if self.runtime == "trtllm" else None

    @property
    def ranks(self) -> int:
        """Ranks, and GPUs, of one server."""
        return self.deployment.tensor_parallel

    @property
    def nodes(self) -> int:
        """Nodes of one server."""
        return max(1, self.ranks // self.deployment.gpus.per_node)

    @property
    def gpus_per_node(self) -> int:
        """GPUs, and ranks, on each node."""
        return self.ranks // self.nodes

    @property
    def reuses_prefixes(self) -> bool:
        """Whether the server reuses cached prefixes, for which a router then looks."""
        return self.deployment.reuses_prefixes(self.runtime, self.method)


def cluster_server(rendered: Rendered, *, version: str, image: str | None, models: str, replicas: int) -> ClusterServer:
    """The server that `rendered`, for the runtime's `version`, starts.

    Raises ConfigError for an invalid image, for weights outside `models`, for engine mode without an `image` that
    has dflash-trt, and for ranks that do not fill their nodes.
    """
    deployment = rendered.deployment
    if not MODELS.fullmatch(models) or ".." in Path(models).parts:
        raise ConfigError(f"--models: expected an absolute path of letters, digits, . _ - and /, found {models}")
    if image is not None and not IMAGE.fullmatch(image):
        raise ConfigError(f"--image: expected a name such as registry/image:tag, found {image!r}")
    for what, name in (("target", deployment.target), ("draft", deployment.draft)):
        if Path(name).is_dir() and (problem := _not_below(name, models)):
            raise ConfigError(f"{what}: {problem[0]}", hint=problem[1])
    if rendered.is_engine_mode and image is None:
        raise ConfigError(
            "--image: expected an image with dflash-trt for engine mode, found none",
            hint="build docs/deploy/trtllm.Dockerfile",
        )
    ranks, per_node = deployment.tensor_parallel, deployment.gpus.per_node
    if ranks > per_node and ranks % per_node:
        raise ConfigError(f"tensor_parallel: expected whole nodes of {per_node} GPUs, found {ranks}")
    return ClusterServer(
        **msgspec.structs.asdict(rendered),
        name=dns_label(deployment.name),
        image=IMAGES[rendered.runtime].format(version) if image is None else image,
        models=models,
        replicas=replicas,
    )


def _not_below(name: str, models: str) -> tuple[str, str] | None:
    """Problem and hint for a directory that a container, which starts in `models`, does not find under its name."""
    here = os.path.normpath(Path(name).absolute())
    if not Path(here).is_relative_to(models):
        problem = f"{here} is not below --models {models}, which is all that a container sees"
        return problem, "give --models the directory of the weights, the same path on every node"
    if os.path.normpath(Path(models, name)) != here:
        return f"{name} names another directory in {models}, where the server starts, than here", f"write {here}"
    return None


def dns_label(name: str) -> str:
    """A name as Kubernetes takes it (RFC 1035): lower-case letters, digits and dashes, a letter first."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return shortened(label if label[:1].isalpha() else f"d-{label}".rstrip("-"), MAX_NAME)


def shortened(label: str, limit: int) -> str:
    """A label of at most `limit` characters; long ones that differ after them stay different."""
    if len(label) <= limit:
        return label
    return f"{label[: limit - 5].rstrip('-')}-{hashlib.sha256(label.encode()).hexdigest()[:4]}"


PORT = 29501
"""Where nodes meet: vLLM's own default, given to SGLang too."""
RANK, LEADER = "NODE_RANK", "LEADER"
"""Variables of a script that people start on each node."""


def node_command(server: ClusterServer, *, rank: str, leader: str) -> str:
    """One line of shell for each node; `rank` and `leader` are names of variables. One node's is the plain command."""
    command = command_line(server.words(CONFIG))
    if server.nodes == 1:
        return f"exec {command}"
    others, flags = _joined(server.runtime, server.nodes, rank, leader)
    return "; ".join([*others, f"exec {command} {flags}"])


def node_script(rendered: Rendered) -> Rendered:
    """A server on several nodes as a script that is started on each, with its rank and the first one's address."""
    nodes = rendered.deployment.gpus.nodes
    head, _, command = rendered.text.partition("\n")
    others, flags = _joined(rendered.runtime, nodes, RANK, LEADER)
    where = f"# On each of {nodes} nodes: {RANK}=0 {LEADER}=ADDRESS sh FILE; the first is 0, and has the address."
    asked = f': "${{{RANK}:?0 on the first node, 1 on the next}}" "${{{LEADER}:?address of the first node}}"'
    text = "\n".join([head, where, asked, *others, f"exec {command.rstrip()} \\\n  {flags}", ""])
    return msgspec.structs.replace(rendered, text=text, node_variables=f"{RANK}=0 {LEADER}=ADDRESS ")


def _joined(runtime: str, nodes: int, rank: str, leader: str) -> tuple[list[str], str]:
    """Commands before a node's own, and the flags after it."""
    flags = f'--nnodes {nodes} --node-rank "${rank}"'
    if runtime == "sglang":
        return [], f'{flags} --dist-init-addr "${leader}:{PORT}"'
    others = f'if [ "${rank}" -gt 0 ]; then set -- --headless; fi'
    return [others], f'{flags} --master-addr "${leader}" --master-port {PORT} "$@"'
