# SPDX-License-Identifier: Apache-2.0
"""A DynamoGraphDeployment (nvidia.com/v1beta1, Dynamo 1.6): a frontend, and its workers.

Commands are `python3 -m MODULE` and everything else is `args`: for several nodes the operator reads vLLM's flags there
alone (deploy/operator/internal/dynamo/backend_vllm.go of ai-dynamo/dynamo at cdf9267d).
"""

from __future__ import annotations

import json

from msgspec.structs import replace

from dflash_trt.deploy.cluster.cluster_server import CONFIG, ClusterServer, shortened
from dflash_trt.deploy.cluster.kubernetes import WEIGHTS, Manifest, config_maps, pod_spec, to_yaml, weights_environment
from dflash_trt.deploy.flags import flag_words
from dflash_trt.deploy.published import target_parsers
from dflash_trt.deploy.render import ENGINE_MODE
from dflash_trt.deploy.schema import Runtime
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
SERVERS_OWN = {"model_tag", "model_path", "host", "port", "enable_auto_tool_choice", "tool_call_parser"}
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
    """Workers serve prompts and answers: drafts of a decode worker alone begin without the prompt's features.

    That is measured for TensorRT-LLM's DSpark (NVIDIA/TensorRT-LLM#16767), so no prefill/decode split is written.
    """
    server = replace(server, name=graph_name(server))
    routing = "kv" if server.reuses_prefixes else "least-loaded"
    frontend = {
        "containers": [
            {
                "name": "main",
                "image": server.image,
                "command": ["python3", "-m", "dynamo.frontend"],
                "args": ["--router-mode", routing, "--migration-limit", "3"],
                "volumeMounts": [{"name": "models", "mountPath": server.models, "readOnly": True}],
                "env": weights_environment(server),
            }
        ],
        "volumes": [WEIGHTS],
    }
    start = [*(ENGINE_MODE if server.is_engine_mode else ("python3", "-m")), f"dynamo.{server.runtime}"]
    worker = pod_spec(server, "main", start, _worker_arguments(server))
    worker["volumes"] = [volume for volume in worker["volumes"] if volume["name"] != "shm"]  # the operator's own
    main = worker["containers"][0]
    main["env"] += [{"name": name, "value": value} for name, value in server.environment.items()]
    main["volumeMounts"] = [mount for mount in main["volumeMounts"] if mount["name"] != "shm"]
    component: Manifest = {"name": WORKER, "type": "worker", "replicas": server.replicas, "sharedMemorySize": "32Gi"}
    if server.nodes > 1:
        component["multinode"] = {"nodeCount": server.nodes}
        if server.runtime == "trtllm":
            main["env"] += [{"name": f"OMPI_ALLOW_RUN_AS_ROOT{end}", "value": "1"} for end in ("", "_CONFIRM")]
    # The operator refuses an image whose tag is no release of Dynamo's, unless it is told which one is in it
    # (deploy/operator/api/v1beta1 of ai-dynamo/dynamo at 006b6e10; dynamo.profiler 1.6.1 writes it as well).
    release = {} if server.image == IMAGE else {"runtimeVersionOverride": RELEASE}
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": server.name},
        "spec": {
            "backendFramework": server.runtime,
            "components": [
                {"name": FRONTEND, "type": "frontend", "replicas": 1, **release, "podTemplate": {"spec": frontend}},
                component | release | {"podTemplate": {"spec": worker}},
            ],
        },
    }
    place = f"port {SERVICE_PORT} of the Service {server.name}-{FRONTEND}"
    return to_yaml(server, place, [*config_maps(server), graph])


def _worker_arguments(server: ClusterServer) -> list[str]:
    words = ["--model" if server.runtime == "vllm" else "--model-path", server.target]
    if server.runtime == "trtllm":
        words += ["--served-model-name", server.target, "--extra-engine-args", CONFIG]
    else:
        kept = {name: value for name, value in server.arguments.items() if name not in SERVERS_OWN}
        words += flag_words(server.runtime, kept)
    parsers = target_parsers(server.target)
    for flag, names in (("--dyn-reasoning-parser", parsers.reasoning), ("--dyn-tool-call-parser", parsers.tool)):
        words += [flag, names["dynamo"]] if "dynamo" in names else []
    return words + (KV_EVENT_FLAGS[server.runtime] if server.reuses_prefixes else [])
