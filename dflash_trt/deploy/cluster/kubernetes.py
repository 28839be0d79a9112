# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests: Deployment and Service; a LeaderWorkerSet where a server needs several nodes."""

from __future__ import annotations

from dflash_trt.deploy.cluster.cluster_server import CONFIG, NO_IMAGE, ClusterServer, node_command
from dflash_trt.deploy.cluster.template import Manifest, manifest, shell_text, yaml_text
from dflash_trt.errors import ConfigError

METRICS = {"trtllm": "/prometheus/metrics", "vllm": "/metrics", "sglang": "/metrics"}
API_KEYS = {"vllm": "VLLM_API_KEY", "sglang": "API_KEY"}
"""Variables with the key that clients must send; vLLM 0.33.0 reads its own."""
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
GROUP_LABEL = "leaderworkerset.sigs.k8s.io/name"
"""Label of all pods of a LeaderWorkerSet: losing any of them restarts its group."""
SSHD = ("NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT")
"""Capabilities without each of which OpenSSH 9.2's sshd failed on port 22; with these alone it let a key in."""
PATIENCE_SECONDS = 3600
"""Time for a target to load."""
PROBE_SECONDS = 10
"""Period of the probes in serving.yaml."""


def kubernetes_manifests(server: ClusterServer) -> str:
    """Manifests for `kubectl apply -f`."""
    labels = {"app.kubernetes.io/name": server.name}
    pod_labels = labels | {"llm-d.ai/engine-type": ENGINE_TYPES[server.runtime]}
    if server.nodes > 1:
        service = f"{server.name}{LEADER}"
        leader, worker = _mpi_pods(server) if server.runtime == "trtllm" else _node_pods(server)
        group = manifest(
            "leader_worker_set.yaml", name=server.name, replicas=server.replicas, nodes=server.nodes,
            pod_labels=pod_labels, leader=leader, worker=worker,
        )  # fmt: skip
    else:
        service = server.name
        group = manifest(
            "deployment.yaml", name=server.name, labels=labels, replicas=server.replicas,
            patience_seconds=PATIENCE_SECONDS, pod_labels=pod_labels, pod=_serving(server, _server_words(server)),
        )  # fmt: skip
    manifests = [
        *config_maps(server),
        group,
        manifest("service.yaml", service=service, labels=labels, port=server.port),
    ]
    if server.replicas > 1:
        pods = labels if server.nodes == 1 else {GROUP_LABEL: server.name}
        manifests.append(manifest("pod_disruption_budget.yaml", name=server.name, labels=labels, pods=pods))
    if server.pod.pod_monitor is not None:
        metrics, found_by = METRICS[server.runtime], labels | server.pod.pod_monitor
        manifests.append(manifest("pod_monitor.yaml", name=server.name, labels=found_by, pods=labels, metrics=metrics))
    return with_needs(server, f"port {server.port} of the Service {service}", manifests)


def with_needs(server: ClusterServer, place: str, manifests: list[Manifest]) -> str:
    """Manifests below a comment that lists what they need, and the `place` where they answer."""
    kinds = {each["kind"] for each in manifests}
    needs = ["the PersistentVolumeClaim models, with the weights, on every node"]
    if "PodMonitor" in kinds:
        needs.append("the Prometheus operator, for the PodMonitor")
    if secret := server.pod.api_key_secret:
        needs.append(f"clients' key: kubectl create secret generic {secret} --from-file=key=FILE")
    needs += [f"the Secret {each['name']}, to pull the image" for each in server.pod.image_pull_secrets or ()]
    if "LeaderWorkerSet" in kinds and server.runtime != "trtllm":
        needs.append("LeaderWorkerSet")
    elif "LeaderWorkerSet" in kinds:
        keys = "--from-file=id_ed25519 --from-file=authorized_keys=id_ed25519.pub"
        needs.append("LeaderWorkerSet, and sshd in the image")
        needs.append(f"a key pair: kubectl create secret generic {server.name}-ssh {keys}")
    lines = (server.head, f"# Answers on {place}", *(f"# Needs {need}" for need in needs))
    return "".join(f"{line}\n" for line in lines) + yaml_text(manifests)


def config_maps(server: ClusterServer) -> list[Manifest]:
    """The YAML that TensorRT-LLM reads; none for the others, which have flags alone."""
    return [] if server.config is None else [manifest("config_map.yaml", name=server.name, config=server.config)]


def container_image(server: ClusterServer) -> str:
    """Image of a pod; ConfigError for none."""
    if server.image == NO_IMAGE:
        raise ConfigError(f"--image: expected an image, as pods run nothing else, found {NO_IMAGE}")
    return server.image


def config_mount(server: ClusterServer) -> dict[str, Manifest | None]:
    """Mount and volume of the ConfigMap, as values of templates."""
    if server.config is None:
        return {"config_mount": None, "config_volume": None}
    mount = {"name": "config", "mountPath": CONFIG.rpartition("/")[0]}
    return {"config_mount": mount, "config_volume": {"name": "config", "configMap": {"name": server.name}}}


def short_hostname(server: ClusterServer) -> list[Manifest]:
    """Environment with which Open MPI spawns the ranks of one node."""
    return [PMIX_HOSTNAME] if server.runtime == "trtllm" and server.nodes == 1 else []


def needed_capabilities(server: ClusterServer) -> tuple[str, ...]:
    """Capabilities of the runtime: RDMA between nodes locks memory; TensorRT-LLM's all-to-all for experts takes
    memory of other ranks by pidfd_getfd on x86 (flashinfer#4089).
    """
    deployment = server.deployment
    shares_memory = server.runtime == "trtllm" and deployment.enable_attention_dp and deployment.expert_parallel > 1
    return (*(("IPC_LOCK",) if server.nodes > 1 else ()), *(("SYS_PTRACE",) if shares_memory else ()))


def _pod(
    server: ClusterServer, container: str, command: list[str], serving: Manifest | None = None, *needed: str
) -> Manifest:
    """A pod with one node's share of the GPUs, the weights, the configuration and shared memory for NCCL."""
    options = server.pod
    environment = [*short_hostname(server), *options.user_environment]
    if options.api_key_secret is not None:
        key = {"secretKeyRef": {"name": options.api_key_secret, "key": "key"}}
        environment.append({"name": API_KEYS[server.runtime], "valueFrom": key})
    pod = manifest(
        "pod.yaml", container=container, image=container_image(server), command=command, models=server.models,
        environment=environment, gpus=server.gpus_per_node, **config_mount(server), **options.placement,
        pod_security=options.pod_security,
        container_security=options.container_security(*needed_capabilities(server), *needed),
    )  # fmt: skip
    pod["containers"][0] |= serving or {}
    return pod


def _serving(server: ClusterServer, command: list[str]) -> Manifest:
    """The pod that answers: probes are patient while the server loads, and find a failure within seconds afterwards."""
    probes = manifest("serving.yaml", port=server.port, startup_attempts=PATIENCE_SECONDS // PROBE_SECONDS)
    return _pod(server, "server", command, probes) | {"terminationGracePeriodSeconds": 120}


def _server_words(server: ClusterServer) -> list[str]:
    """The command; vLLM reads clients' key from the environment, SGLang takes a flag."""
    has_flag = server.runtime == "sglang" and server.pod.api_key_secret is not None
    return [*server.words(CONFIG), *(["--api-key", f"$({API_KEYS['sglang']})"] if has_flag else [])]


def _node_pods(server: ClusterServer) -> tuple[Manifest, Manifest]:
    """vLLM and SGLang: every pod runs one command, by its index."""
    command = node_command(server, rank="LWS_WORKER_INDEX", leader="LWS_LEADER_ADDRESS")
    if server.runtime == "sglang" and server.pod.api_key_secret is not None:
        command += f' --api-key "${API_KEYS["sglang"]}"'
    return _serving(server, ["bash", "-c", command]), _pod(server, "worker", ["bash", "-c", command])


def _mpi_pods(server: ClusterServer) -> tuple[Manifest, Manifest]:
    """TensorRT-LLM: mpirun on the leader reaches the others' sshd by the names of the group.

    LWS_LEADER_ADDRESS is NAME-0.NAME.NAMESPACE, worker I of it NAME-0-I.NAME.NAMESPACE, names that Open MPI would cut
    at the first dot. Commands over ssh lack the image's environment: an absolute mpirun finds its own parts there, and
    paths are passed on. Host keys are made with their pods and are not checked; the Secret's key authenticates.
    """
    if server.pod.run_as_user is not None:
        raise ConfigError("--set kubernetes.run-as-user: expected image for TensorRT-LLM on several nodes, whose sshd"
                          " runs as root")  # fmt: skip
    launch = shell_text(
        "mpi_leader.sh", gpus_per_node=server.gpus_per_node, workers=server.nodes - 1, ranks=server.ranks,
        command=server.words(CONFIG),
    )  # fmt: skip
    worker = ["bash", "-c", shell_text("mpi_worker.sh")]
    pods = _serving(server, ["bash", "-c", launch]), _pod(server, "worker", worker, None, *SSHD)
    for pod in pods:
        pod["containers"][0]["volumeMounts"].append({"name": "ssh", "mountPath": "/root/.ssh"})
        pod["volumes"].append({"name": "ssh", "secret": {"secretName": f"{server.name}-ssh", "defaultMode": 0o600}})
    return pods
