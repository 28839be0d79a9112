# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests: Deployment, Service and PodMonitor; a LeaderWorkerSet where a server needs several nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from dflash_trt.deploy.cluster.cluster_server import CONFIG, NO_IMAGE, ClusterServer, node_command
from dflash_trt.errors import ConfigError
from dflash_trt.files.command import command_line

Manifest = dict[str, Any]
WEIGHTS = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
"""Volume of an existing claim with the weights."""
METRICS = {"trtllm": "/prometheus/metrics", "vllm": "/metrics", "sglang": "/metrics"}
ENGINE_TYPES = {"trtllm": "trtllm-serve", "vllm": "vllm", "sglang": "sglang"}
"""Values of a pod's label llm-d.ai/engine-type, by which llm-d's router knows the names of its metrics
(pkg/epp/framework/plugins/datalayer/extractor/metrics/factories.go of llm-d/llm-d-router v0.10.0).
"""
PMIX_HOSTNAME = {"name": "PMIX_HOSTNAME", "value": "trtllm-node"}
"""Short name in place of a pod's: Open MPI 5, in TensorRT-LLM's images from 1.3.0rc27 on, spawns no workers under a
long one (NVIDIA/TensorRT-LLM#19019; llm-d sets it too). Under gpt-oss-120b-b300x8-latency-7d9f8b6c5d-x2x4z 5.0.11
failed, and spawned with this. Several nodes, started by mpirun, need names that differ.
"""
LEADER = "-leader"
"""Suffix of a LeaderWorkerSet's Service: the set itself makes one with its name, for its pods."""
PATIENCE_SECONDS = 3600
"""Time for a target to load."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes no aliases, and multi-line texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def kubernetes_manifests(server: ClusterServer) -> str:
    """Manifests for `kubectl apply -f`."""
    labels = {"app.kubernetes.io/name": server.name}
    group = _leader_worker_set(server, labels) if server.nodes > 1 else _deployment(server, labels)
    name = server.name + LEADER if server.nodes > 1 else server.name
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(server, labels) | {"name": name},
        "spec": {"selector": labels, "ports": [{"name": "http", "port": server.port, "targetPort": "http"}]},
    }
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": _metadata(server, labels),
        "spec": {
            "selector": {"matchLabels": labels},
            "podMetricsEndpoints": [{"port": "http", "path": METRICS[server.runtime]}],
        },
    }
    return to_yaml(server, f"port {server.port} of the Service {name}", [*config_maps(server), group, service, monitor])


def to_yaml(server: ClusterServer, place: str, manifests: list[Manifest]) -> str:
    """Several documents, below a comment that says what must be there, and in which `place` they answer."""
    kinds = {manifest["kind"] for manifest in manifests}
    needs = ["the PersistentVolumeClaim models, with the weights, on every node"]
    if "PodMonitor" in kinds:
        needs.append("the Prometheus operator; without it, remove the PodMonitor")
    if "LeaderWorkerSet" in kinds and server.runtime != "trtllm":
        needs.append("LeaderWorkerSet")
    elif "LeaderWorkerSet" in kinds:
        keys = "--from-file=id_ed25519 --from-file=authorized_keys=id_ed25519.pub"
        needs.append("LeaderWorkerSet, and sshd in the image")
        needs.append(f"a key pair: kubectl create secret generic {server.name}-ssh {keys}")
    lines = (server.head, f"# Answers on {place}", *(f"# Needs {need}" for need in needs))
    head = "".join(f"{line}\n" for line in lines)
    return f"{head}{yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)}"


def config_maps(server: ClusterServer) -> list[Manifest]:
    """The YAML that TensorRT-LLM reads; none for the others, whose flags say everything."""
    if server.config is None:
        return []
    name = CONFIG.rpartition("/")[2]
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": server.name}, "data": {name: server.config}}]


def pod_spec(server: ClusterServer, container: str, command: list[str], arguments: Sequence[str] = ()) -> Manifest:
    """A pod with one node's share of the GPUs, the weights, the configuration and shared memory for NCCL."""
    if server.image == NO_IMAGE:
        raise ConfigError(f"--image: expected an image, as pods run nothing else, found {NO_IMAGE}")
    mounts = [{"name": "models", "mountPath": server.models}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    volumes: list[Manifest] = [WEIGHTS, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Gi"}}]
    if server.config is not None:
        mounts.append({"name": "config", "mountPath": CONFIG.rpartition("/")[0]})
        volumes.append({"name": "config", "configMap": {"name": server.name}})
    main = {
        "name": container,
        "image": server.image,
        "command": command,
        **({"args": list(arguments)} if arguments else {}),
        "workingDir": server.models,
        "env": weights_environment(server)
        + ([PMIX_HOSTNAME] if server.runtime == "trtllm" and server.nodes == 1 else []),
        "resources": {"limits": {"nvidia.com/gpu": server.gpus_per_node}},
        "volumeMounts": mounts,
    }
    return {"containers": [main], "volumes": volumes}


def weights_environment(server: ClusterServer) -> list[Manifest]:
    """Environment that reads weights from the volume and downloads nothing."""
    return [{"name": "HF_HOME", "value": server.models}, {"name": "HF_HUB_OFFLINE", "value": "1"}]


def _metadata(server: ClusterServer, labels: dict[str, str]) -> Manifest:
    return {"name": server.name, "labels": labels}


def _pod_labels(server: ClusterServer, labels: dict[str, str]) -> dict[str, str]:
    return labels | {"llm-d.ai/engine-type": ENGINE_TYPES[server.runtime]}


def _serving(spec: Manifest, port: int) -> Manifest:
    """Add the port and the probes: slow while the server loads, within seconds afterwards."""
    probe = {"httpGet": {"path": "/health", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5}
    spec["containers"][0] |= {
        "ports": [{"name": "http", "containerPort": port}],
        "startupProbe": probe | {"failureThreshold": PATIENCE_SECONDS // 10},
        "readinessProbe": probe,
        "livenessProbe": probe | {"failureThreshold": 6},
    }
    return spec | {"terminationGracePeriodSeconds": 120}


def _deployment(server: ClusterServer, labels: dict[str, str]) -> Manifest:
    spec = _serving(pod_spec(server, "server", server.words), server.port)
    template = {"metadata": {"labels": _pod_labels(server, labels)}, "spec": spec}
    deployment = {
        "replicas": server.replicas,
        "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},  # an update finds no GPUs to spare
        "progressDeadlineSeconds": PATIENCE_SECONDS,
        "selector": {"matchLabels": labels},
        "template": template,
    }
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": _metadata(server, labels), "spec": deployment}


def _leader_worker_set(server: ClusterServer, labels: dict[str, str]) -> Manifest:
    """A group of pods for each server; LeaderWorkerSet tells each its index, and the leader's address."""
    leader, worker = _mpi_pods(server) if server.runtime == "trtllm" else _node_pods(server)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": server.name},
        "spec": {
            "replicas": server.replicas,
            "leaderWorkerTemplate": {
                "size": server.nodes,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "leaderTemplate": {"metadata": {"labels": _pod_labels(server, labels)}, "spec": leader},
                "workerTemplate": {"spec": worker},
            },
        },
    }


def _node_pods(server: ClusterServer) -> tuple[Manifest, Manifest]:
    """vLLM and SGLang: every pod runs one command, by its index."""
    command = ["bash", "-c", node_command(server, rank="LWS_WORKER_INDEX", leader="LWS_LEADER_ADDRESS")]
    return _serving(pod_spec(server, "server", command), server.port), pod_spec(server, "worker", command)


def _mpi_pods(server: ClusterServer) -> tuple[Manifest, Manifest]:
    """TensorRT-LLM: mpirun on the leader reaches the others' sshd by the names of the group.

    LWS_LEADER_ADDRESS is NAME-0.NAME.NAMESPACE, worker I of it NAME-0-I.NAME.NAMESPACE, names that Open MPI would cut
    at the first dot. What ssh starts has none of the image's environment: an absolute mpirun finds its own parts there,
    and paths are passed on. Host keys are made with their pods and are not checked; the Secret's key authenticates.
    """
    slots = server.gpus_per_node
    launch = f"""set -eu
options=(-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR)
hosts=$LWS_LEADER_ADDRESS:{slots}
for worker in $(seq 1 {server.nodes - 1}); do
  host=${{LWS_LEADER_ADDRESS%%.*}}-$worker.${{LWS_LEADER_ADDRESS#*.}}
  hosts=$hosts,$host:{slots}
  until ssh "${{options[@]}}" "$host" true; do sleep 2; done
done
exec "$(command -v mpirun)" --allow-run-as-root -n {server.ranks} --host "$hosts" \\
  --mca plm_rsh_args "${{options[*]}}" --mca orte_keep_fqdn_hostnames 1 \\
  -x PATH -x LD_LIBRARY_PATH -x HF_HOME -x HF_HUB_OFFLINE \\
  trtllm-llmapi-launch {command_line(server.words)}
"""
    sshd = """set -eu
mkdir -p /run/sshd
ssh-keygen -A
exec /usr/sbin/sshd -D -o StrictModes=no -o PasswordAuthentication=no
"""
    leader = _serving(pod_spec(server, "server", ["bash", "-c", launch]), server.port)
    worker = pod_spec(server, "worker", ["bash", "-c", sshd])
    for spec in (leader, worker):
        spec["containers"][0]["volumeMounts"].append({"name": "ssh", "mountPath": "/root/.ssh"})
        spec["volumes"].append({"name": "ssh", "secret": {"secretName": f"{server.name}-ssh", "defaultMode": 0o600}})
    return leader, worker
