# SPDX-License-Identifier: Apache-2.0
"""From a configuration in a file to an answer of its server: numbered steps, as a shell script to paste from.

Options of the containers: NVIDIA's own for one node (TensorRT-LLM's Quick Start Guide, 1.4.0rc1; vLLM's and SGLang's
pages give --gpus and --ipc), and dgx-spark-playbooks @ 0db7c141 for several.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from dflash_trt.deploy.cluster.cluster_server import IMAGES, ClusterServer
from dflash_trt.deploy.cluster.dynamo_graph import FRONTEND, graph_name
from dflash_trt.deploy.cluster.kubernetes import LEADER
from dflash_trt.deploy.cluster.template import Text, shell_text
from dflash_trt.deploy.deployment_file import Method
from dflash_trt.deploy.render import Rendered, render
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.schema import PACKAGES, Runtime
from dflash_trt.deploy.trtllm_arguments import converted_draft
from dflash_trt.errors import BuildError
from dflash_trt.files.command import command_line, quoted
from dflash_trt.files.read import open_file
from dflash_trt.files.write import OutputKind

DOWNLOAD = "hf download"
OWN_IMAGE = "dflash-trt:trtllm"
"""Image of docs/deploy/trtllm.Dockerfile, which engine mode needs."""
STEP = re.compile(r"^## ", re.MULTILINE)


def _is_ours(file: Path) -> bool:
    with open_file(file, BuildError) as stream:
        return b"# dflash-trt " in b"".join(stream.read(4096).splitlines(True)[:2])


CONFIGURATION = OutputKind(
    name="a configuration that dflash-trt wrote", recognizes=_is_ours, form="file", option="-o FILE"
)


def server_steps(rendered: Rendered, source: str, *, version: str, file: Path) -> str:
    """Steps for a server on this machine, or on each of several nodes, whose configuration `rendered` is in `file`."""
    deployment, runtime = rendered.deployment, rendered.runtime
    weights = _lines(weight_commands(deployment, source, runtime, rendered.method))
    ask = _ask(rendered.port)
    if deployment.gpus.nodes > 1:
        image, inside = IMAGES[runtime].format(version), f"/config/{file.name}"
        steps = shell_text(
            "steps_nodes.sh", weights=weights, image=image, volume=f"{file.absolute()}:{inside}:ro", inside=inside,
            name=Text(file.name), package=PACKAGES[runtime], file=Text(quoted(file)), ask=ask,
        )  # fmt: skip
        return _numbered(rendered.head, steps)
    is_engine = rendered.is_engine_mode
    # The container sees this directory and the hub's cache; a configuration that lies elsewhere is mounted, too.
    is_below = not file.is_absolute() and ".." not in file.parts
    inside_file = file if is_below else Path("/configuration", file.name)
    is_mounted = runtime == "trtllm" and not is_below
    mounted = command_line(["--volume", f"{file.absolute()}:{inside_file}:ro"])
    published = render(deployment, runtime, rendered.method, host="0.0.0.0", port=rendered.port)  # noqa: S104 - on loopback
    program, *arguments = published.words(*shlex.split(quoted(inside_file)))
    start = f"sh {quoted(file)}" if runtime != "trtllm" else rendered.start.replace("FILE", quoted(file))
    steps = shell_text(
        "steps_server.sh", weights=weights, image=OWN_IMAGE if is_engine else IMAGES[runtime].format(version),
        build=Text(f"docker build -f docs/deploy/trtllm.Dockerfile -t {OWN_IMAGE} ." if is_engine else ""),
        build_remark=Text("# docker build: in a checkout of dflash-trt." if is_engine else ""), port=rendered.port,
        volume=Text(f" {mounted}" if is_mounted else ""), program=program, arguments=arguments,
        package=Text(f"{PACKAGES[runtime]} {version}"), start=Text(start), ask=ask,
    )  # fmt: skip
    return _numbered(rendered.head, steps)


def cluster_steps(server: ClusterServer, source: str, *, launcher: str, file: Path) -> str:
    """Steps for a server of a cluster, whose manifests or script are in `file`; launcher slurm, kubernetes, dynamo."""
    rendered, models = server.rendered, server.models
    weights = list(weight_commands(rendered.deployment, source, rendered.runtime, rendered.method))
    file_name, ask = Text(quoted(file)), _ask(server.port)
    if launcher == "slurm":
        change = command_line(["cd", models])
        below = _lines(f"({change} && {command})" for command in weights)
        steps = shell_text("steps_slurm.sh", models=models, weights=below, file=file_name, port=server.port, ask=ask)
        return _numbered(rendered.head, steps)
    service = f"{graph_name(server)}-{FRONTEND}" if launcher == "dynamo" else server.name
    if launcher == "kubernetes" and server.nodes > 1:
        service += LEADER
    fetch = " && ".join(["pip install --quiet huggingface_hub", *(w for w in weights if w.startswith(DOWNLOAD))])
    made = [command for command in weights if not command.startswith(DOWNLOAD)]
    steps = shell_text(
        "steps_kubernetes.sh", name=server.name, fetch=Text(json.dumps(fetch, ensure_ascii=False)), models=models,
        mounted=_lines(f"# Where {models} is mounted: cd {models} && {command}" for command in made), file=file_name,
        service=f"service/{service}", port=server.port, ask=ask,
    )  # fmt: skip
    return _numbered(rendered.head, steps)


def _ask(port: int) -> Text:
    return Text(shell_text("ask.sh", url=f"http://127.0.0.1:{port}").rstrip("\n"))


def _lines(lines: Iterator[str]) -> Text:
    return Text("\n".join(lines))


def _numbered(head: str, steps: str) -> str:
    """The steps, each begun by `## TITLE`, with numbers; those without commands are left out."""
    titled = (step.partition("\n") for step in STEP.split(steps)[1:])
    kept = [(title, body.strip("\n")) for title, _, body in titled if body.strip()]
    texts = [f"\n# {number}. {title}\n{body}\n" for number, (title, body) in enumerate(kept, 1)]
    note = "# Steps to paste one after the other; nothing here has run on a GPU yet."
    return f"#!/bin/bash\n{head}\n{note}\n{''.join(texts)}"


def commands_for_draft(deployment: ResolvedDeployment, source: str, runtime: Runtime, method: Method) -> list[str]:
    """Commands that convert or build the draft which the server reads; none where it is here, or is downloaded."""
    commands = weight_commands(deployment, source, runtime, method)
    return [command for command in commands if not command.startswith(DOWNLOAD)]


def weight_commands(deployment: ResolvedDeployment, source: str, runtime: Runtime, method: Method) -> Iterator[str]:
    """Commands that download or make what the server reads and is not here."""
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
