# SPDX-License-Identifier: Apache-2.0
"""What manifests must hold beside their schemas: problems, each in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
CLAIMS = {"models"}
# What the operator's schema takes (ai-dynamo/dynamo at cdf9267d, deploy/operator/config/crd/bases/
# nvidia.com_dynamographdeployments.yaml, v1beta1), of which this project writes a part. The graphs of all shipped
# deployments were held against the whole of it. A podTemplate is Kubernetes' own.
GRAPH = {"backendFramework", "components"}
FRAMEWORKS = {"sglang", "vllm", "trtllm"}
COMPONENT = {"name", "type", "replicas", "multinode", "sharedMemorySize", "runtimeVersionOverride", "podTemplate"}
COMPONENT_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?")
RELEASE = re.compile(r"(0|[1-9]\d{0,3})(\.(0|[1-9]\d{0,3})){2}")
QUANTITY = re.compile(r"[0-9]+([KMGTPE]i)?")
MAX_COMPONENTS = 25
MAX_NAMES = 45  # Grove's (internal/webhook/admission/pcs/validation/podcliqueset.go of ai-dynamo/grove at fcc3b3bb)
# Without each of which Open MPI 4.1.8 and sshd 9.2 failed in two network namespaces.
MPI_NEEDS = (
    "-o StrictHostKeyChecking=no", "-o UserKnownHostsFile=/dev/null", '"$(command -v mpirun)"',
    "--mca orte_keep_fqdn_hostnames 1", "-x PATH -x LD_LIBRARY_PATH",
)  # fmt: skip
TYPES = {"frontend", "worker", "prefill", "decode", "planner", "epp"}


def read(text: str) -> dict[str, dict[str, Any]]:
    """Documents by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def pods(documents: dict[str, dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each pod's specification, and how many of them make a server."""
    if deployment := documents.get("Deployment"):
        yield 1, deployment["spec"]["template"]["spec"]
    if group := documents.get("LeaderWorkerSet"):
        template = group["spec"]["leaderWorkerTemplate"]
        yield 1, template["leaderTemplate"]["spec"]
        yield template["size"] - 1, template["workerTemplate"]["spec"]
    if graph := documents.get("DynamoGraphDeployment"):
        for component in graph["spec"]["components"]:
            yield component.get("multinode", {}).get("nodeCount", 1), component["podTemplate"]["spec"]


def problems(documents: dict[str, dict[str, Any]], ranks: int) -> Iterator[str]:
    """Yield the faults in manifests of a server with `ranks` GPUs (TP x PP)."""
    for kind, document in documents.items():
        if not DNS_LABEL.fullmatch(document["metadata"]["name"]):
            yield f"{kind}: no DNS label: {document['metadata']['name']}"
    gpus = 0
    for count, spec in pods(documents):
        (container,) = spec["containers"]
        gpus += count * container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
        yield from _mount_problems(documents, spec, container)
    if gpus != ranks:
        yield f"{gpus} GPUs for {ranks} ranks"
    yield from _port_problems(documents)
    if graph := documents.get("DynamoGraphDeployment"):
        yield from _graph_problems(graph["metadata"]["name"], graph["spec"])
    if group := documents.get("LeaderWorkerSet"):
        script = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]["command"][2]
        yield from (f"LeaderWorkerSet: no {need} for mpirun" for need in MPI_NEEDS if need not in script)
        if group["metadata"]["name"] == documents["Service"]["metadata"]["name"]:
            yield "LeaderWorkerSet: the Service has the name of the one that its pods find each other by"


def _graph_problems(name: str, spec: dict[str, Any]) -> Iterator[str]:
    if unknown := spec.keys() - GRAPH:
        yield f"graph: unknown {unknown}"
    if spec["backendFramework"] not in FRAMEWORKS:
        yield f"graph: no framework {spec['backendFramework']}"
    names = [component["name"] for component in spec["components"]]
    if len({name.lower() for name in names}) < len(names) or not all(map(COMPONENT_NAME.fullmatch, names)):
        yield f"graph: names {names}"
    if not 0 < len(names) <= MAX_COMPONENTS:
        yield f"graph: {len(names)} components"
    for component in spec["components"]:
        roles = [component["name"], f"{component['name']}-ldr"] if "multinode" in component else [component["name"]]
        if (length := sum(map(len, (name, *roles)))) > MAX_NAMES:
            yield f"component {component['name']}: names of {length} characters in its pods'"
        if component["replicas"] < 0 or not QUANTITY.fullmatch(component.get("sharedMemorySize", "0")):
            yield f"component {component['name']}: replicas or sharedMemorySize"
        if unknown := component.keys() - COMPONENT:
            yield f"component: unknown {unknown}"
        (container,) = component["podTemplate"]["spec"]["containers"]
        if container["name"] != "main":
            yield f"component {component['name']}: no container main"
        tag = container["image"].rpartition(":")[2]
        if not RELEASE.fullmatch(component.get("runtimeVersionOverride", tag)):
            yield f"component {component['name']}: which release of Dynamo's is in {container['image']}?"
        if container["command"][:1] not in (["python"], ["python3"]) or not container["args"]:
            yield f"component {component['name']}: flags that the operator does not read"
        if component["type"] not in TYPES or component.get("multinode", {"nodeCount": 2})["nodeCount"] < 2:
            yield f"component {component['name']}"


def _mount_problems(
    documents: dict[str, dict[str, Any]], spec: dict[str, Any], container: dict[str, Any]
) -> Iterator[str]:
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    if mounts.keys() != volumes.keys():
        yield f"mounts {sorted(mounts)} of volumes {sorted(volumes)}"
    for volume in volumes.values():
        if "configMap" in volume and volume["configMap"]["name"] != documents["ConfigMap"]["metadata"]["name"]:
            yield f"no ConfigMap {volume['configMap']['name']}"
        if "persistentVolumeClaim" in volume and volume["persistentVolumeClaim"]["claimName"] not in CLAIMS:
            yield "no claim"
    config = documents.get("ConfigMap", {}).get("data", {})
    used = " ".join([*container["command"], *container.get("args", ()), container.get("workingDir", "/models")])
    for path in re.findall(r"(?<![\w$}.:-])/[\w./-]+", used):
        folder = next((folder for folder in mounts.values() if path == folder or path.startswith(f"{folder}/")), None)
        if folder is None and not path.startswith(("/usr/", "/run/", "/dev/null")):
            yield f"not mounted: {path}"
        if folder == "/config" and path.rpartition("/")[2] not in config:
            yield f"not in the ConfigMap: {path}"


def _port_problems(documents: dict[str, dict[str, Any]]) -> Iterator[str]:
    if "Service" not in documents:
        return
    leader = next(spec for _, spec in pods(documents))["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
    words = " ".join(leader["command"]).split()
    if str(ports["http"]) != words[words.index("--port") + 1]:
        yield f"the server listens on {words[words.index('--port') + 1]}, the pod says {ports['http']}"
    asked = {documents["Service"]["spec"]["ports"][0]["targetPort"], leader["readinessProbe"]["httpGet"]["port"]}
    asked.add(documents["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["port"])
    if not asked <= ports.keys():
        yield f"no port {asked - ports.keys()}"
    labels = documents["Service"]["spec"]["selector"]
    if documents["PodMonitor"]["spec"]["selector"]["matchLabels"] != labels:
        yield "PodMonitor selects other pods"
