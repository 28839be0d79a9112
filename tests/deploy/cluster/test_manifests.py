# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests and graphs of Dynamo's: valid by the published schemas, and their parts fit each other."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from dflash_trt.errors import ConfigError
from tests.cli.commands import run_here
from tests.deploy.deployments import BUILD_CONFIGS, resolved, shellcheck
from tests.paths import FIXTURES, REPOSITORY
from tests.waiting import PATIENCE

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
CLAIMS = {"models"}
# The part of the operator's schema that this project writes (ai-dynamo/dynamo at cdf9267d,
# deploy/operator/config/crd/bases/ nvidia.com_dynamographdeployments.yaml, v1beta1). The graphs of all included
# deployments were checked against the full schema. A podTemplate is Kubernetes' own.
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
        needs = MPI_NEEDS if "trtllm-serve" in script else ("--nnodes 2", '--node-rank "$LWS_WORKER_INDEX"')
        yield from (f"LeaderWorkerSet: no {need} for several nodes" for need in needs if need not in script)
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
    asked = {documents["Service"]["spec"]["ports"][0]["targetPort"]}
    monitors = [documents["PodMonitor"]["spec"]] if "PodMonitor" in documents else []
    asked |= {spec["podMetricsEndpoints"][0]["port"] for spec in monitors}
    if not asked <= ports.keys():
        yield f"no port {asked - ports.keys()}"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if leader[probe]["httpGet"] != {"path": "/health", "port": "http"}:
            yield f"{probe}: {leader[probe]['httpGet']}"
    labels = documents["Service"]["spec"]["selector"]
    if any(spec["selector"]["matchLabels"] != labels for spec in monitors):
        yield "PodMonitor selects other pods"


KUBERNETES = ("--launcher", "kubernetes")
NATIVE = "gpt-oss-120b.b300x8.latency"
ENGINE = "gpt-oss-120b.b300x8.nvfp4"
ONE_GPU = "qwen3-4b.h200x1.latency"
TARGET = FIXTURES / "tiny-qwen3"
HERE = (str(FIXTURES / "tiny-qwen3-dflash"), "--target", str(TARGET), "--gpus", "h200x1")
KINDS = [
    *((name, "trtllm", *KUBERNETES, "--image", "registry/image:1") for name in (NATIVE, ENGINE, ONE_GPU)),
    (NATIVE, "vllm", *KUBERNETES),
    (NATIVE, "sglang", *KUBERNETES),
    (NATIVE, "dynamo-trtllm"),
    (ENGINE, "dynamo-trtllm", "--image", "registry/image:1"),
    (NATIVE, "dynamo-vllm", "--image", "registry/image:1"),
    (NATIVE, "dynamo-sglang", "--image", "registry/image:1"),
    ("two-nodes", "trtllm", *KUBERNETES),
    ("two-nodes", "dynamo-trtllm", "--replicas", "2"),
]


def write_two_nodes(folder: Path) -> None:
    """A deployment of 16 GPUs, as a file."""
    document = yaml.safe_load((BUILD_CONFIGS / f"{NATIVE}.yaml").read_text()) | {"gpus": "b300x16"}
    (folder / "two-nodes.yaml").write_text(yaml.safe_dump(document))


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_two_nodes(tmp_path)
    monkeypatch.chdir(tmp_path)


def written(capsys: pytest.CaptureFixture[str], name: str, runtime: str, *options: str) -> str:
    source = f"{name}.yaml" if name == "two-nodes" else name
    run_here("serve-config", source, "--runtime", runtime, *options)
    return capsys.readouterr().out


def check_manifests(documents: dict[str, dict[str, Any]], ranks: int) -> None:
    """By the rules here and Kubernetes' own schemas; of the resources that operators define, the pods in them."""
    assert list(problems(documents, ranks)) == []
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents.values():
        if document["apiVersion"] in ("v1", "apps/v1", "policy/v1"):
            kubernetes_validate.validate(document, "1.34", strict=True)
    for _, spec in pods(documents):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, "1.34", strict=True)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("asked", KINDS, ids=" ".join)
def test_manifests(asked: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    ranks = 16 if asked[0] == "two-nodes" else resolved(asked[0]).tensor_parallel
    check_manifests(read(written(capsys, *asked)), ranks)


@pytest.mark.full
@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("name", [NATIVE, "two-nodes"])
def test_kustomize_changes_what_is_written(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not installed")
    (tmp_path / "serve.yaml").write_text(written(capsys, name, "trtllm", *KUBERNETES))
    shutil.copy(REPOSITORY / "docs" / "deploy" / "kustomization.yaml", tmp_path)
    built = subprocess.run(
        [kubectl, "kustomize", tmp_path], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    documents = read(built.stdout)
    assert list(problems(documents, 16 if name == "two-nodes" else 8)) == []
    assert {document["metadata"]["namespace"] for document in documents.values()} == {"inference"}
    server = documents["LeaderWorkerSet" if name == "two-nodes" else "Deployment"]
    assert server["spec"]["replicas"] == 2
    assert all("nvidia.com/gpu.product" in spec["nodeSelector"] for _, spec in pods(documents))


def test_commands_of_dynamo(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags of the runtimes, without the address that only their own servers bind."""
    for runtime, expected in {
        "dynamo-trtllm": "python3 -m dynamo.trtllm --model-path openai/gpt-oss-120b --",
        "dynamo-vllm": "python3 -m dynamo.vllm --model openai/gpt-oss-120b --",
        "dynamo-sglang": "python3 -m dynamo.sglang --model-path openai/gpt-oss-120b --",
    }.items():
        documents = read(written(capsys, NATIVE, runtime, "--image", "registry/image:1"))
        _, (_, worker) = pods(documents)
        container = worker["containers"][0]
        assert " ".join([*container["command"], *container["args"]]).startswith(expected)
        assert not {"--host", "--port", "--enable-auto-tool-choice", "--tool-call-parser"} & set(container["args"])
        assert "--dyn-reasoning-parser gpt_oss --dyn-tool-call-parser harmony" in " ".join(container["args"])
        assert (runtime == "dynamo-trtllm") == any(each["name"] == "PMIX_HOSTNAME" for each in container["env"])
    documents = read(written(capsys, ENGINE, "dynamo-trtllm", "--image", "registry/image:1"))
    _, (_, worker) = pods(documents)
    assert worker["containers"][0]["command"] == ["python", "-m", "dflash_trt.trtllm", "dynamo.trtllm"]


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("runtime", "reuse", "expected"),
    [
        ("dynamo-trtllm", True, ["--publish-kv-events"]),
        ("dynamo-vllm", True, ["--kv-events-config"]),
        ("dynamo-vllm", False, []),
    ],
)
def test_routing_follows_what_workers_keep(
    runtime: str, reuse: bool, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KV routing needs events, and events need pages that are reused."""
    file = tmp_path / "two-nodes.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"prefix_reuse": reuse}))
    documents = read(written(capsys, "two-nodes", runtime, "--image", "registry/image:1"))
    (_, frontend), (_, worker) = pods(documents)
    assert ("kv" in frontend["containers"][0]["args"]) == reuse
    assert [word for word in worker["containers"][0]["args"] if "kv-events" in word and word[0] == "-"] == expected


@pytest.mark.parametrize("nodes", [1, 2])
def test_long_names_are_cut_and_stay_apart(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load((BUILD_CONFIGS / f"{NATIVE}.yaml").read_text()) | {"gpus": f"b300x{8 * nodes}"}
    monkeypatch.chdir(tmp_path)
    names = set()
    for name in ("a.deployment-with-a-name.of-many-words.latency", "a.deployment-with-a-name.of-many-words.throughput"):
        Path(f"{name}.yaml").write_text(yaml.safe_dump(document))
        documents = read(written(capsys, f"{name}.yaml", "dynamo-trtllm"))
        assert list(problems(documents, 8 * nodes)) == []
        names.add(documents["DynamoGraphDeployment"]["metadata"]["name"])
    assert len(names) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ENGINE, "--runtime", "trtllm", *KUBERNETES), "--image: expected an image with dflash-trt"),
        ((ENGINE, "--runtime", "dynamo-trtllm"), "--image: expected an image of Dynamo's with dflash-trt"),
        ((NATIVE, "--runtime", "dynamo-vllm"), "Dynamo 1.6.1's own has 0.31.0"),
        ((NATIVE, "--runtime", "dynamo-sglang"), "Dynamo 1.6.1's own has 0.5.21"),
        ((NATIVE, "--runtime", "trtllm", "--launcher", "slurm", "--replicas", "2"), "--replicas: expected 1"),
        ((NATIVE, "--runtime", "trtllm", *KUBERNETES, "--image", "-x"), "--image: expected a name such as"),
        ((NATIVE, "--runtime", "dynamo-trtllm", "--image", ""), "--image: expected a name such as"),
        ((NATIVE, "--runtime", "trtllm", *KUBERNETES, "--image", "none"), "--image: expected an image, as pods run"),
        ((NATIVE, "--runtime", "trtllm", *KUBERNETES, "--models", "/a b"), "--models: expected an absolute path"),
        ((NATIVE, "--runtime", "trtllm", *KUBERNETES, "--models", "/a/../b"), "--models: expected an absolute path"),
        ((*HERE, "--runtime", "trtllm", *KUBERNETES), "is not below --models /models, which is all"),
        (
            (*HERE, "--runtime", "trtllm", *KUBERNETES, "--models", f"{TARGET}"),
            "tiny-qwen3-dflash is not below --models",
        ),
        (("two-nodes.yaml", "--runtime", "trtllm"), "expected GPUs of one node"),
        ((NATIVE, "--runtime", "trtllm", "--image", "x"), "--image is for --launcher and dynamo runtimes"),
        ((NATIVE, "--runtime", "dynamo-trtllm", *KUBERNETES), "Dynamo's operator starts"),
        ((NATIVE, "--runtime", "dynamo-trtllm", "--port", "9000"), "--port has no use here: Dynamo's operator sets"),
        ((NATIVE, "--runtime", "trtllm", *KUBERNETES, "--host", "a"), "--host has no use here: a pod's server binds"),
    ],
)
@pytest.mark.usefixtures("two_nodes")
def test_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises((ConfigError, click.UsageError), match=message):
        run_here("serve-config", *arguments)


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("name", [NATIVE, ENGINE, "two-nodes"])
def test_scripts_pass_shellcheck(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.sh"
    for image in ("registry/image:1", "none"):
        script.write_text(written(capsys, name, "trtllm", "--launcher", "slurm", "--image", image))
        assert shellcheck(script) == ""
    if name == "two-nodes":
        documents = read(written(capsys, name, "trtllm", *KUBERNETES))
        for _, spec in pods(documents):
            script.write_text(spec["containers"][0]["command"][2])
            assert shellcheck(script) == ""
