# SPDX-License-Identifier: Apache-2.0
"""A DynamoGraphDeployment (nvidia.com/v1beta1, Dynamo 1.6): a frontend, and its workers.

Commands are `python3 -m MODULE` and everything else is `args`: for several nodes the operator reads vLLM's flags there
alone (deploy/operator/internal/dynamo/backend_vllm.go of ai-dynamo/dynamo at cdf9267d).
"""

from __future__ import annotations

import json

from msgspec.structs import replace

from dflash_trt.deploy.catalog import needs_thinking_off
from dflash_trt.deploy.cluster.cluster_server import CONFIG, ClusterServer, shortened
from dflash_trt.deploy.cluster.kubernetes import (
    config_maps,
    config_mount,
    container_image,
    needed_capabilities,
    short_hostname,
    with_needs,
)
from dflash_trt.deploy.cluster.template import manifest
from dflash_trt.deploy.command_text import flag_words
from dflash_trt.deploy.parsers import target_parsers
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.trtllm_arguments import ENGINE_MODE
from dflash_trt.errors import ConfigError

RELEASE = "1.6.1"
IMAGE = f"nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:{RELEASE}"
OLDER = {"vllm": "0.31.0", "sglang": "0.5.21"}
"""Releases in Dynamo's own images; its TensorRT-LLM 1.3.0rc29 takes the arguments of 1.4.0rc1."""
FRONTEND, WORKER = "frontend", "worker"
SERVICE_PORT = 8000
"""Port that the operator sets."""
MAX_NAMES = 45
"""Grove's limit for the names that make up a pod's (internal/webhook/admission/pcs/validation/podcliqueset.go of
ai-dynamo/grove at fcc3b3bb): the graph's and the component's, and for several nodes also the role's, WORKER-ldr."""
SERVERS_OWN = {
    "model_tag", "model_path", "host", "port", "enable_auto_tool_choice", "tool_call_parser",
    "default_chat_template_kwargs",
}  # fmt: skip
"""Arguments that Dynamo's workers do not take, or take otherwise: its frontend is the server, and parses tool calls."""
KV_EVENTS = {"publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://*:20080"}
KV_EVENT_FLAGS: dict[Runtime, list[str]] = {
    "trtllm": ["--publish-kv-events"],
    "vllm": ["--kv-events-config", json.dumps(KV_EVENTS | {"enable_kv_cache_events": True})],
    "sglang": ["--kv-events-config", json.dumps(KV_EVENTS)],
}
RUNTIMES: dict[str, Runtime] = {"dynamo-trtllm": "trtllm", "dynamo-vllm": "vllm", "dynamo-sglang": "sglang"}


def dynamo_image(runtime: Runtime, version: str, image: str | None, *, is_engine_mode: bool) -> str:
    """The workers' image; ConfigError where Dynamo's own has no dflash-trt for engine mode, or an older release than
    `version`, whose flags are written.
    """
    if image is None and runtime in OLDER:
        raise ConfigError(
            f"--image: expected an image of Dynamo's with {runtime} {version}, whose flags are written,"
            f" found none: Dynamo {RELEASE}'s own has {OLDER[runtime]}"
        )
    if image is None and is_engine_mode:
        raise ConfigError(
            "--image: expected an image of Dynamo's with dflash-trt for engine mode, found none",
            hint=f"build docs/deploy/trtllm.Dockerfile with --build-arg BASE={IMAGE} --build-arg USER=1000",
        )
    return IMAGE if image is None else image


def graph_name(server: ClusterServer) -> str:
    """Name of the server's graph: the operator appends those of its components."""
    roles = len(FRONTEND) if server.nodes == 1 else len(WORKER) + len(f"{WORKER}-ldr")
    return shortened(server.name, MAX_NAMES - roles)


def dynamo_graph(server: ClusterServer) -> str:
    """A frontend and workers that serve both prompts and answers.

    No prefill/decode split is written: a decode worker alone drafts without the prompt's hidden states, as was measured
    for TensorRT-LLM's DSpark (NVIDIA/TensorRT-LLM#16767). The operator refuses an image whose tag is no release of
    Dynamo's, unless `runtimeVersionOverride` names the one in it (deploy/operator/api/v1beta1 of ai-dynamo/dynamo at
    006b6e10; dynamo.profiler 1.6.1 writes it as well). It adds shared memory to workers itself.
    """
    server = replace(server, name=graph_name(server))
    start = [*(ENGINE_MODE if server.is_engine_mode else ("python3", "-m")), f"dynamo.{server.runtime}"]
    variables = dict(server.environment)
    if server.nodes > 1 and server.runtime == "trtllm":
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    graph = manifest(
        "dynamo_graph.yaml", name=server.name, runtime=server.runtime, image=container_image(server),
        release=None if server.image == IMAGE else RELEASE, routing="kv" if server.reuses_prefixes else "least-loaded",
        models=server.models, replicas=server.replicas, start=start, arguments=_worker_arguments(server),
        multinode={"nodeCount": server.nodes} if server.nodes > 1 else None, gpus=server.gpus_per_node,
        environment=short_hostname(server) + [{"name": name, "value": value} for name, value in variables.items()],
        **config_mount(server), **server.pod.placement, frontend_security=server.pod.container_security(),
        container_security=server.pod.container_security(*needed_capabilities(server)),
    )  # fmt: skip
    return with_needs(
        server, f"port {SERVICE_PORT} of the Service {server.name}-{FRONTEND}", [*config_maps(server), graph]
    )


def _worker_arguments(server: ClusterServer) -> list[str]:
    target = server.deployment.target
    words = ["--model" if server.runtime == "vllm" else "--model-path", target]
    if server.runtime == "trtllm":
        words += ["--served-model-name", target, "--extra-engine-args", CONFIG]
    else:
        kept = {name: value for name, value in server.arguments.items() if name not in SERVERS_OWN}
        words += flag_words(server.runtime, kept)
    parsers = target_parsers(target)
    for flag, names in (("--dyn-reasoning-parser", parsers.reasoning), ("--dyn-tool-call-parser", parsers.tool)):
        words += [flag, names["dynamo"]] if "dynamo" in names else []
    if needs_thinking_off(server.deployment.checkpoint):
        words += ["--dyn-default-thinking-mode", "disabled"]
    return words + (KV_EVENT_FLAGS[server.runtime] if server.reuses_prefixes else [])
