# SPDX-License-Identifier: Apache-2.0
"""From a configuration in a file to an answer of its server: numbered steps, as a shell script to paste from.

Options of the containers: NVIDIA's own for one node (TensorRT-LLM's Quick Start Guide, 1.4.0rc1; vLLM's and SGLang's
pages give --gpus and --ipc), and dgx-spark-playbooks @ 0db7c141 for several.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dflash_trt.deploy.catalog import needs_thinking_off
from dflash_trt.deploy.cluster.cluster_server import IMAGES, ClusterServer
from dflash_trt.deploy.cluster.dynamo_graph import FRONTEND, graph_name
from dflash_trt.deploy.cluster.kubernetes import LEADER
from dflash_trt.deploy.cluster.pod_options import PodOptions
from dflash_trt.deploy.cluster.slurm import plans_srun
from dflash_trt.deploy.cluster.template import Manifest, Text, manifest, shell_text, yaml_text
from dflash_trt.deploy.render import Rendered, render
from dflash_trt.deploy.schema import PACKAGES
from dflash_trt.deploy.weight_commands import DOWNLOAD, plans_command, weight_commands
from dflash_trt.errors import BuildError, ConfigError
from dflash_trt.files.command import command_line, file_word
from dflash_trt.files.read import open_file
from dflash_trt.files.write import OutputKind

OWN_IMAGE = "dflash-trt:trtllm"
"""Image of docs/deploy/trtllm.Dockerfile, which engine mode needs."""
PYTHON = "python:3.12-slim"
"""Image of the Job that downloads weights."""
TENSORRT = "11.4.0.106"
"""TensorRT of that image and of the extras `tensorrt` and `trtllm`; it runs no plans of another release."""
SOURCE = "DFLASH_SOURCE"
"""Variable with a checkout of dflash-trt, for the image."""
BUILD_IMAGE = (
    f'docker build --file "${{{SOURCE}:?a checkout of dflash-trt}}/docs/deploy/trtllm.Dockerfile" --tag {OWN_IMAGE}'
    f' "${SOURCE}"'
)
NEEDS = "Docker with NVIDIA's container toolkit, and the commands dflash-trt and hf (pip install huggingface_hub)"
CHECKOUT = f"; {SOURCE} is a checkout of dflash-trt"
CLUSTER_NEEDS = {
    "slurm": "sbatch, ssh to the nodes, and dflash-trt and hf (pip install huggingface_hub) where the weights are",
    "kubernetes": "kubectl, and dflash-trt",
}
NO_THINKING = ', "chat_template_kwargs": {"enable_thinking": false}'
STEP = re.compile(r"^## ", re.MULTILINE)


def _is_ours(file: Path) -> bool:
    with open_file(file, BuildError) as stream:
        return b"# dflash-trt " in b"".join(stream.read(4096).splitlines(True)[:2])


CONFIGURATION = OutputKind(
    name="a configuration that dflash-trt wrote", recognizes=_is_ours, form="file", option="-o FILE"
)


def server_steps(rendered: Rendered, source: str, *, version: str, file: Path) -> str:
    """Steps for a server on this machine, or on each of several nodes, whose configuration `rendered` is in `file`.

    The container sees the directory where the steps are run, under its own path, and what else they name outside it.
    """
    deployment, runtime = rendered.deployment, rendered.runtime
    weights = _lines(weight_commands(deployment, source, runtime, rendered.method))
    ask = _ask(rendered.port, deployment.checkpoint)
    name = file_word(file)
    if deployment.gpus.nodes > 1:
        steps = shell_text(
            "steps_nodes.sh", weights=weights, image=IMAGES[runtime].format(version), file=name,
            volumes=_volumes([*_models(rendered), str(file)]), package=PACKAGES[runtime], ask=ask,
        )  # fmt: skip
        return _numbered(rendered.head, NEEDS, steps)
    published = render(deployment, runtime, rendered.method, host="0.0.0.0", port=rendered.port)  # noqa: S104 - on loopback
    program, *arguments = published.words(name)
    plans = plans_command(deployment, runtime, rendered.method)
    image = OWN_IMAGE if plans else IMAGES[runtime].format(version)
    package, start = f"{PACKAGES[runtime]} {version}", rendered.start(name)
    if plans:
        package = f"{package}, TensorRT {TENSORRT} and dflash-trt with its CUDA kernels"
        start = f"{command_line(plans)} && {start}"
    read = [*_models(rendered), *([str(file)] if runtime == "trtllm" else [])]
    steps = shell_text(
        "steps_server.sh", weights=weights, image=image, build=Text(BUILD_IMAGE if plans else ""),
        plans=Text(_plans_step(plans)), port=rendered.port, volumes=_volumes(read), program=program,
        arguments=arguments, package=Text(package), start=Text(start), ask=ask,
    )  # fmt: skip
    return _numbered(rendered.head, f"{NEEDS}{CHECKOUT if plans else ''}", steps)


def _models(rendered: Rendered) -> list[str]:
    """Directories or repository ids of the models that the server reads."""
    deployment = rendered.deployment
    drafts = {"dflash": deployment.draft if rendered.runtime == "trtllm" else deployment.checkpoint}
    if rendered.method == "eagle3":
        drafts["eagle3"] = deployment.eagle3_drafter().model
    return [deployment.target, *([drafts[rendered.method]] if rendered.method in drafts else [])]


def _plans_step(plans: list[str]) -> str:
    """The command in a container that may write beside the engine; empty without plans."""
    if not plans:
        return ""
    engine = plans[-1]
    volumes = _volumes([str(Path(engine).parent)], mode="") if Path(engine).is_absolute() else Text("")
    program, *arguments = plans
    return shell_text("build_plans.sh", volumes=volumes, program=program, image=OWN_IMAGE, arguments=arguments).rstrip(
        "\n"
    )


def _volumes(paths: Iterable[str], mode: str = ":ro") -> Text:
    """Docker's options for paths outside the directory that the container sees, each mounted under its own path."""
    options = []
    for path in dict.fromkeys(os.path.normpath(Path(each).absolute()) for each in paths if _is_outside(each)):
        if ":" in path:
            raise ConfigError(f"{path}: Docker cannot mount a path that contains a colon", hint="rename it")
        options.append(f" {command_line(['--volume', f'{path}:{path}{mode}'])}")
    return Text("".join(options))


def _is_outside(path: str) -> bool:
    """Whether a path is here, and not below this directory; a repository id is not."""
    return Path(path).is_absolute() or ".." in Path(path).parts


def cluster_steps(server: ClusterServer, source: str, *, launcher: str, file: Path) -> str:
    """Steps for a server of a cluster, whose manifests or script are in `file`; launcher slurm, kubernetes, dynamo."""
    deployment, runtime, models = server.deployment, server.runtime, server.models
    weights = list(weight_commands(deployment, source, runtime, server.method))
    plans = plans_command(deployment, runtime, server.method)
    file_name, ask = file_word(file), _ask(server.port, deployment.checkpoint, server.pod.api_key_secret)
    if launcher == "slurm":
        change = command_line(["cd", models])
        below = _lines(f"({change} && {command})" for command in weights)
        build = f"{plans_srun(server)} {command_line(plans)}" if plans else ""
        mpi = "srun --mpi=pmix --nodes=1 --ntasks=1 true" if runtime == "trtllm" else ""
        steps = shell_text(
            "steps_slurm.sh", models=models, weights=below, plans=Text(build), mpi=Text(mpi), file=file_name,
            port=server.port, ask=ask,
        )  # fmt: skip
        return _numbered(server.head, CLUSTER_NEEDS["slurm"], steps)
    service = f"{graph_name(server)}-{FRONTEND}" if launcher == "dynamo" else server.name
    if launcher == "kubernetes" and server.nodes > 1:
        service += LEADER
    fetch = ['export PATH="$HOME/.local/bin:$PATH"', "pip install --quiet huggingface_hub"]
    fetch += [command for command in weights if command.startswith(DOWNLOAD)]
    made = [command for command in weights if not command.startswith(DOWNLOAD)]
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token", "optional": True}}}
    download = _job(
        server, "weights", image=PYTHON, command=["sh", "-c", " && ".join(fetch)], environment=[token],
        **PodOptions().placement, resources=None,
    )  # fmt: skip
    build = _job(
        server, "plans", image=server.image, command=plans, environment=[], **server.pod.placement,
        resources={"limits": {"nvidia.com/gpu": 1}},
    )  # fmt: skip
    steps = shell_text(
        "steps_kubernetes.sh", weights=download, mounted=_lines(f"# Where {models} is mounted: cd {models} && {command}"
        for command in made), file=file_name, plans=build if plans else Text(""), service=f"service/{service}",
        port=server.port, ask=ask,
    )  # fmt: skip
    return _numbered(server.head, CLUSTER_NEEDS["kubernetes"], steps)


def _job(server: ClusterServer, suffix: str, *, environment: list[Manifest], **values: Any) -> Text:
    """Commands that run a Job beside the volume `models`, as the server's user, and wait for it."""
    name = f"{server.name}-{suffix}"
    job = manifest(
        "job.yaml", name=name, models=server.models, environment=[*environment, *server.pod.user_environment],
        pod_security=server.pod.pod_security, container_security=server.pod.container_security(), **values,
    )  # fmt: skip
    return Text(shell_text("job.sh", name=name, job=Text(yaml_text([job]).rstrip("\n"))).rstrip("\n"))


def _ask(port: int, draft: str, api_key_secret: str | None = None) -> Text:
    """Commands that ask the server as `draft` was trained; with the key in a Secret, which they read into a file."""
    key = authorization = key_file = ""
    if api_key_secret is not None:
        read = "--output go-template='{{.data.key | base64decode}}'"
        key = f"(umask 077 && kubectl get secret {api_key_secret} {read} > api-key)"
        authorization, key_file = ' -H "Authorization: Bearer $(cat api-key)"', " --api-key-file api-key"
    url = f"http://127.0.0.1:{port}"
    text = shell_text(
        "ask.sh", url=url, key=Text(key), authorization=Text(authorization), key_file=Text(key_file),
        variables=Text(NO_THINKING if needs_thinking_off(draft) else ""),
    )  # fmt: skip
    return Text(text.rstrip("\n"))


def _lines(lines: Iterator[str]) -> Text:
    return Text("\n".join(lines))


def _numbered(head: str, needs: str, steps: str) -> str:
    """The steps, each begun by `## TITLE`, with numbers; those without commands are left out."""
    titled = (step.partition("\n") for step in STEP.split(steps)[1:])
    kept = [(title, body.strip("\n")) for title, _, body in titled if body.strip()]
    texts = [f"\n# {number}. {title}\n{body}\n" for number, (title, body) in enumerate(kept, 1)]
    note = "# Steps to paste one after the other, in one directory; nothing here has run on a GPU yet."
    return f"#!/bin/bash\n{head}\n{note}\n# Needs {needs}.\n{''.join(texts)}"
