# SPDX-License-Identifier: Apache-2.0
"""A DynamoGraphDeployment (nvidia.com/v1beta1, Dynamo 1.6): a frontend that routes by KV events, and its workers."""

from __future__ import annotations

from dflash_trt.deploy.cluster.cluster_server import CONFIG, ClusterServer
from dflash_trt.deploy.cluster.kubernetes import Manifest, config_maps, pod_spec, to_yaml
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.trtllm_arguments import ENGINE_MODE
from dflash_trt.errors import ConfigError

RELEASE = "1.6.1"
IMAGE = f"nvcr.io/nvidia/ai-dynamo/tensorrtllm-runtime:{RELEASE}"
OLDER = {"vllm": "0.31.0", "sglang": "0.5.21"}
"""In Dynamo's own images; of TensorRT-LLM it has 1.3.0rc29, whose arguments are those of 1.4.0rc1."""
RUNTIMES: dict[str, Runtime] = {"dynamo-trtllm": "trtllm", "dynamo-vllm": "vllm", "dynamo-sglang": "sglang"}


def dynamo_image(runtime: Runtime, version: str, image: str | None, *, is_engine_mode: bool) -> str | None:
    """The workers' image; ConfigError where Dynamo's own has an older release than `version`, whose flags are written.

    None: one is needed, for engine mode.
    """
    if image is None and runtime in OLDER:
        raise ConfigError(
            f"--image: expected an image of Dynamo's with {runtime} {version}, whose flags are written,"
            f" found none: Dynamo {RELEASE}'s own has {OLDER[runtime]}"
        )
    return image or (None if is_engine_mode else IMAGE)


def dynamo_graph(server: ClusterServer) -> str:
    """Workers serve prompts and answers: drafts of a decode worker alone begin without the prompt's features.

    That is measured for TensorRT-LLM's DSpark (NVIDIA/TensorRT-LLM#16767), so no prefill/decode split is written.
    """
    frontend = {
        "containers": [
            {
                "name": "main",
                "image": server.image,
                "command": ["python3", "-m", "dynamo.frontend", "--router-mode", "kv", "--migration-limit", "3"],
                "volumeMounts": [{"name": "models", "mountPath": server.models, "readOnly": True}],
                "env": [{"name": "HF_HOME", "value": server.models}, {"name": "HF_HUB_OFFLINE", "value": "1"}],
            }
        ],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    }
    worker = pod_spec(server, "main", _worker_command(server))
    worker["volumes"] = [volume for volume in worker["volumes"] if volume["name"] != "shm"]  # the operator's own
    main = worker["containers"][0]
    main["volumeMounts"] = [mount for mount in main["volumeMounts"] if mount["name"] != "shm"]
    component: Manifest = {"name": "worker", "type": "worker", "replicas": server.replicas, "sharedMemorySize": "32Gi"}
    if server.nodes > 1:
        component["multinode"] = {"nodeCount": server.nodes}
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
                {"name": "frontend", "type": "frontend", "replicas": 1, **release, "podTemplate": {"spec": frontend}},
                component | release | {"podTemplate": {"spec": worker}},
            ],
        },
    }
    return to_yaml(server, [*config_maps(server), graph])


def _worker_command(server: ClusterServer) -> list[str]:
    if server.runtime == "trtllm":
        start = [*ENGINE_MODE, "dynamo.trtllm"] if server.is_engine_mode else ["python3", "-m", "dynamo.trtllm"]
        names = ["--model-path", server.target, "--served-model-name", server.target]
        return [*start, *names, "--extra-engine-args", CONFIG, "--publish-kv-events"]
    flag = "--model" if server.runtime == "vllm" else "--model-path"
    flags = server.words[server.words.index(server.target) + 1 :] if server.runtime == "vllm" else server.words[3:]
    listening = [index for index, word in enumerate(flags) if word in ("--host", "--port", flag)]
    kept = [word for index, word in enumerate(flags) if not {index, index - 1} & set(listening)]
    return ["python3", "-m", f"dynamo.{server.runtime}", flag, server.target, *kept]
