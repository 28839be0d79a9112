# SPDX-License-Identifier: Apache-2.0
"""From a configuration in a file to an answer of its server: numbered steps, as a shell script to paste from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from dflash_trt.deploy.cluster.cluster_server import IMAGES, RANK, ClusterServer
from dflash_trt.deploy.cluster.cluster_server import LEADER as FIRST
from dflash_trt.deploy.cluster.dynamo_graph import FRONTEND, graph_name
from dflash_trt.deploy.cluster.kubernetes import LEADER
from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.render import Rendered, converted_draft, is_engine_mode, render
from dflash_trt.deploy.resolve import ResolvedDeployment
from dflash_trt.deploy.schema import PACKAGES, Runtime
from dflash_trt.errors import BuildError
from dflash_trt.files.command import command_line, quoted
from dflash_trt.files.read import open_file
from dflash_trt.files.write import OutputKind


def _is_ours(file: Path) -> bool:
    with open_file(file, BuildError) as stream:
        return b"# dflash-trt " in b"".join(stream.read(4096).splitlines(True)[:2])


CONFIGURATION = OutputKind(
    name="a configuration that dflash-trt wrote", recognizes=_is_ours, form="file", option="-o FILE"
)
DOWNLOAD = "hf download"
OWN_IMAGE = "dflash-trt:trtllm"
"""Image of docs/deploy/trtllm.Dockerfile, which engine mode needs."""
NAME = "dflash"
"""Name of the container."""
DOCKER = (
    "docker", "run", "--detach", "--rm", "--name", NAME, "--gpus", "all", "--ipc", "host",
    "--ulimit", "memlock=-1", "--ulimit", "stack=67108864",
)  # fmt: skip
"""NVIDIA's own options: TensorRT-LLM's Quick Start Guide, 1.4.0rc1; vLLM's and SGLang's pages give --gpus and --ipc."""
MOUNTS = '--volume "$PWD:/work" --volume "$HOME/.cache/huggingface:/root/.cache/huggingface"'
LINKS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""Variables that name the interface between nodes."""
MODEL = """model=$(curl -fsS "$url/v1/models" |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')"""
ASK = """curl -fsS "$url/v1/chat/completions" -H 'Content-Type: application/json' \\
  -d '{"model": "'"$model"'", "messages": [{"role": "user", "content": "Write a prime sieve in Python."}]}'"""


class Step(msgspec.Struct, frozen=True):
    """One step: what it does, commands, and remarks below them."""

    title: str
    commands: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def server_steps(
    deployment: ResolvedDeployment, source: str, runtime: Runtime, method: Method, rendered: Rendered, *,
    version: str, file: Path, port: int,
) -> str:  # fmt: skip
    """Steps for a server on this machine, or on each of several nodes, whose configuration `rendered` is in `file`."""
    if deployment.gpus.nodes > 1:
        return _node_steps(deployment, source, runtime, method, rendered, IMAGES[runtime].format(version), file, port)
    start = f"sh {quoted(file)}" if runtime != "trtllm" else rendered.start.replace("FILE", quoted(file))
    in_container = render(deployment, runtime, method, host="0.0.0.0", port=port)  # noqa: S104 - published on loopback
    is_engine = runtime == "trtllm" and is_engine_mode(deployment, method)
    image = OWN_IMAGE if is_engine else IMAGES[runtime].format(version)
    docker = _docker(in_container, runtime, image, file, port)
    steps = [
        Step("Get the weights", tuple(_weights(deployment, source, runtime, method))),
        Step(
            f"Start the server in a container ({image})",
            (*((f"docker build -f docs/deploy/trtllm.Dockerfile -t {OWN_IMAGE} .",) if is_engine else ()), docker),
            (
                *(("docker build: in a checkout of dflash-trt.",) if is_engine else ()),
                f"Or, where {PACKAGES[runtime]} {version} is installed: {start} &",
            ),
        ),
        *_ask(f"http://127.0.0.1:{port}"),
        Step("Stop it", (f"docker stop {NAME}",), ("Or, without the container: kill %1",)),
    ]
    return _script(rendered.text.partition("\n")[0], steps)


def _node_steps(
    deployment: ResolvedDeployment, source: str, runtime: Runtime, method: Method, rendered: Rendered, image: str,
    file: Path, port: int,
) -> str:  # fmt: skip
    """Steps for a script that each node starts; options of the container: NVIDIA's dgx-spark-playbooks @ 0db7c141."""
    docker = command_line((*DOCKER, "--network", "host", "--device", "/dev/infiniband", "--workdir", "/work"))
    variables = " ".join(f"--env {name}" for name in (RANK, FIRST, *LINKS, "HF_TOKEN"))
    inside = command_line(["--entrypoint", "sh", image, f"/config/{file.name}"])
    links = " ".join(f"{name}=INTERFACE" for name in LINKS)
    steps = [
        Step("Get the weights, on every node", tuple(_weights(deployment, source, runtime, method))),
        Step(
            f"Start the server in a container ({image}), on every node",
            (
                f'export {RANK}="${{{RANK}:?0 on the first node, 1 on the next}}"',
                f'export {FIRST}="${{{FIRST}:?address of the first node}}"',
                f"{docker} \\\n  {variables} \\\n  {MOUNTS} \\\n"
                f"  {command_line(['--volume', f'{file.absolute()}:/config/{file.name}:ro'])} \\\n  {inside}",
            ),
            (
                f"{file.name} has to lie on every node. The link between them: export {links}",
                f"Or, where {PACKAGES[runtime]} is installed: sh {quoted(file)} &",
            ),
        ),
        *_ask(f"http://127.0.0.1:{port}"),
        Step("Stop it, on every node", (f"docker stop {NAME}",), ("Or, without the container: kill %1",)),
    ]
    return _script(rendered.text.partition("\n")[0], steps)


def cluster_steps(
    deployment: ResolvedDeployment, source: str, runtime: Runtime, method: Method, server: ClusterServer, *,
    launcher: str, file: Path,
) -> str:  # fmt: skip
    """Steps for a server of a cluster, whose manifests or script are in `file`; launcher slurm, kubernetes, dynamo."""
    weights = tuple(_weights(deployment, source, runtime, method))
    if launcher == "slurm":
        change = command_line(["cd", server.models])
        steps = [
            Step(f"Put the weights below {server.models} of every node",
                 (f"export HF_HOME={server.models}", *(f"({change} && {command})" for command in weights))),
            Step("Submit", (f"job=$(sbatch --parsable {quoted(file)})",
                            'until squeue --job "$job" --noheader --format %T | grep -q RUNNING; do sleep 5; done')),
            Step("Reach the first node, where the server answers",
                 ('node=$(scontrol show hostnames "$(squeue --job "$job" --noheader --format %N)" | head -n 1)',
                  f'ssh -f -N -L {server.port}:127.0.0.1:{server.port} "$node"')),
        ]  # fmt: skip
        stop: tuple[str, ...] = ('scancel "$job"',)
    else:
        mounted = [f"Where {server.models} is mounted: cd {server.models} && {w}" for w in weights if DOWNLOAD not in w]
        access = "Several nodes read it at once: its access mode is ReadWriteMany, or ReadOnlyMany once filled."
        forward = f"kubectl port-forward {_service(server, launcher)} {server.port}"
        steps = [
            Step("Fill the PersistentVolumeClaim models", (_fill(server, weights),), (access, *mounted)),
            Step("Apply", (f"kubectl apply -f {quoted(file)}",)),
            Step("Forward the port, as soon as pods run", (f"(until {forward}; do sleep 5; done) > /dev/null 2>&1 &",)),
        ]
        stop = ("kill %1", f"kubectl delete -f {quoted(file)}")
    return _script(server.head, [*steps, *_ask(f"http://127.0.0.1:{server.port}"), Step("Stop it", stop)])


def _service(server: ClusterServer, launcher: str) -> str:
    if launcher == "dynamo":
        return f"service/{graph_name(server)}-{FRONTEND}"
    return f"service/{server.name}{LEADER if server.nodes > 1 else ''}"


def _script(head: str, steps: list[Step]) -> str:
    lines = ["#!/bin/bash", head, "# Steps to paste one after the other; nothing here has run on a GPU yet."]
    for number, step in enumerate((step for step in steps if step.commands), 1):
        lines += ["", f"# {number}. {step.title}", *step.commands, *(f"# {remark}" for remark in step.remarks)]
    return "\n".join(lines) + "\n"


def commands_for_draft(deployment: ResolvedDeployment, source: str, runtime: Runtime, method: Method) -> list[str]:
    """Commands that convert or build the draft which the server reads; none where it is here, or is downloaded."""
    return [command for command in _weights(deployment, source, runtime, method) if not command.startswith(DOWNLOAD)]


def _weights(deployment: ResolvedDeployment, source: str, runtime: Runtime, method: Method) -> Iterator[str]:
    """Commands that bring or make what the server reads and is not here."""
    if not Path(deployment.target).is_dir():
        yield f"{DOWNLOAD} {command_line([deployment.target])}"
    if method == "eagle3":
        yield f"{DOWNLOAD} {command_line([deployment.eagle3_drafter().model])}"
    if method != "dflash":
        return
    draft = deployment.draft if runtime == "trtllm" or deployment.mode == "native" else deployment.checkpoint
    if Path(draft).is_dir():
        return
    if draft != deployment.checkpoint:  # quantised, or an engine
        yield command_line(["dflash-trt", "build", source])
        if deployment.mode == "engine":
            yield command_line(["dflash-trt", "build", "--plans-for", draft])
    elif runtime == "trtllm" and (converted := converted_draft(deployment.draft_sizes)) is not None:
        if not Path(converted).is_dir():
            yield command_line(["dflash-trt", "quantize", draft, "--recipe", "bf16", "-o", converted])
    else:
        yield f"{DOWNLOAD} {command_line([draft])}"


def _docker(rendered: Rendered, runtime: Runtime, image: str, file: Path, port: int) -> str:
    """The command that runs the server in a container, which sees this directory and the cache of the hub.

    It also sees a configuration that lies elsewhere.
    """
    is_below = not file.is_absolute() and ".." not in file.parts
    inside = file if is_below else Path("/configuration", file.name)
    start = rendered.start.replace("FILE", quoted(inside)) if runtime == "trtllm" else rendered.text
    words = shlex.split(start.replace("\\\n", " "), comments=True)
    shared = (*DOCKER, "--publish", f"127.0.0.1:{port}:{port}", "--workdir", "/work", "--env", "HF_TOKEN")
    mounts = MOUNTS
    if runtime == "trtllm" and not is_below:
        mounts += f" {command_line(['--volume', f'{file.absolute()}:{inside}:ro'])}"
    return f"{command_line(shared)} \\\n  {mounts} \\\n  --entrypoint {command_line([words[0], image, *words[1:]])}"


def _ask(url: str) -> Iterator[Step]:
    yield Step(
        "Wait until it is healthy: a large model takes minutes",
        (f"url={url}", 'until curl -fsS "$url/health" > /dev/null 2>&1; do sleep 5; done'),
    )
    yield Step("Ask", (MODEL, ASK))
    yield Step("See whether it drafts as it should", ('dflash-trt doctor "$url"',))


def _fill(server: ClusterServer, weights: Sequence[str]) -> str:
    """A Job that downloads what the server reads into the volume."""
    fetch = " && ".join(["pip install --quiet huggingface_hub", *(w for w in weights if w.startswith(DOWNLOAD))])
    return f"""kubectl apply -f - <<'JOB'
apiVersion: batch/v1
kind: Job
metadata: {{name: {server.name}-weights}}
spec:
  template:
    spec:
      restartPolicy: OnFailure
      containers:
      - name: download
        image: python:3.12-slim
        command: [sh, -c, "{fetch}"]
        env: [{{name: HF_HOME, value: {server.models}}}]
        volumeMounts: [{{name: models, mountPath: {server.models}}}]
      volumes: [{{name: models, persistentVolumeClaim: {{claimName: models}}}}]
JOB
kubectl wait --for condition=complete --timeout 2h job/{server.name}-weights"""
