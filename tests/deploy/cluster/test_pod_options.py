# SPDX-License-Identifier: Apache-2.0
"""Options of pods: what `--set kubernetes.OPTION=VALUE` writes, byte for byte, and what it refuses."""

from __future__ import annotations

import re
import tempfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from dflash_trt import __version__
from dflash_trt.errors import ConfigError
from tests.cli.commands import run, run_here
from tests.deploy.cluster.test_manifests import (
    ENGINE,
    KUBERNETES,
    NATIVE,
    check_manifests,
    pods,
    read,
    two_nodes,
    write_two_nodes,
    written,
)
from tests.paths import REPOSITORY

__all__ = ["two_nodes"]
GOLDEN = REPOSITORY / "tests" / "golden" / "cluster"
PLACE = (
    "node-selector=nvidia.com/gpu.product=NVIDIA-B300", "tolerations=nvidia.com/gpu:NoSchedule,team=a:NoExecute",
    "image-pull-secrets=registry,mirror",
)  # fmt: skip
SERVED = ("--replicas", "2", *(word for each in PLACE for word in ("--set", f"kubernetes.{each}")))
CLIENTS = ("--set", "kubernetes.api-key-secret=clients", "--set", "kubernetes.pod-monitor=release=prometheus")
CASES: dict[str, tuple[str, ...]] = {
    "deployment.vllm": (NATIVE, "vllm", *KUBERNETES, *SERVED, *CLIENTS),
    "deployment.trtllm": (NATIVE, "trtllm", *KUBERNETES, *SERVED, "--set", "kubernetes.run-as-user=1000"),
    "group.trtllm": ("two-nodes", "trtllm", *KUBERNETES, *SERVED, "--set", "kubernetes.pod-monitor=yes"),
    "group.sglang": ("two-nodes", "sglang", *KUBERNETES, *SERVED, *CLIENTS),
    "graph.vllm": (NATIVE, "dynamo-vllm", "--image", "registry/image:1", *SERVED),
}


def printed(case: str) -> str:
    """The manifests, without the version of the tool that wrote them."""
    name, runtime, *options = CASES[case]
    source = f"{name}.yaml" if name == "two-nodes" else name
    return run("serve-config", source, "--runtime", runtime, *options).stdout.replace(__version__, "VERSION")


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize("case", CASES)
def test_manifests_are_frozen_and_valid(case: str) -> None:
    """After a wanted change: python -m tests.deploy.cluster.test_pod_options"""
    text = (GOLDEN / f"{case}.yaml").read_text()
    assert printed(case) == text
    check_manifests(read(text), 16 if "two-nodes" in CASES[case] else 8)


@pytest.mark.usefixtures("two_nodes")
def test_who_runs_and_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def kept(*asked: str) -> list[tuple[int | None, list[str]]]:
        contexts = [s["containers"][0]["securityContext"] for _, s in pods(read(written(capsys, *asked)))]
        return [(each.get("runAsUser"), each["capabilities"].get("add", [])) for each in contexts]

    image, experts = ("--image", "registry/image:1"), "gpt-oss-120b.b200x2.throughput"
    sshd = ["NET_BIND_SERVICE", "SETGID", "SETUID", "SYS_CHROOT"]
    assert kept(NATIVE, "vllm", *KUBERNETES) == [(2000, [])]
    assert kept(NATIVE, "vllm", *KUBERNETES, "--set", "kubernetes.run-as-user=image") == [(None, [])]
    assert kept(NATIVE, "sglang", *KUBERNETES) == [(None, [])]
    assert kept(experts, "trtllm", *KUBERNETES) == [(None, ["SYS_PTRACE"])]
    assert kept("two-nodes", "trtllm", *KUBERNETES) == [(None, ["IPC_LOCK"]), (None, ["IPC_LOCK", *sshd])]
    assert kept("two-nodes", "dynamo-vllm", *image) == [(1000, []), (1000, ["IPC_LOCK"])]
    capability = ("--set", "kubernetes.capabilities=SYS_NICE,IPC_LOCK")
    assert kept("two-nodes", "vllm", *KUBERNETES, *capability) == [(2000, ["IPC_LOCK", "SYS_NICE"])] * 2


def test_a_budget_needs_a_second_server_and_a_monitor_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = read(written(capsys, NATIVE, "vllm", *KUBERNETES)).keys()
    assert kinds == {"Deployment", "Service"}


@pytest.mark.parametrize("runtime", ["trtllm", "vllm"])
def test_jobs_are_valid_and_run_as_the_server_does(runtime: str, tmp_path: Path) -> None:
    """The token of gated weights is optional; the build of plans needs a node with a GPU as the server does."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    name = ENGINE if runtime == "trtllm" else NATIVE
    result = run("serve-config", name, "--runtime", runtime, *KUBERNETES, *SERVED, "--image", "a/b:1", "-o",
                 tmp_path / "serve.yaml")  # fmt: skip
    jobs = [yaml.safe_load(job) for job in re.findall("<<'END_OF_JOB'\n(.*?)\nEND_OF_JOB\n", result.stdout, re.S)]
    assert len(jobs) == (2 if runtime == "trtllm" else 1)
    specs: list[dict[str, Any]] = [job["spec"]["template"]["spec"] for job in jobs]
    for job, spec in zip(jobs, specs, strict=True):
        kubernetes_validate.validate(job, "1.34", strict=True)
        assert spec["containers"][0]["securityContext"].get("runAsUser") == (None if runtime == "trtllm" else 2000)
    token = {each["name"]: each for each in specs[0]["containers"][0]["env"]}["HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hf-token", "key": "token", "optional": True}
    assert [("nodeSelector" in spec, "resources" in spec["containers"][0]) for spec in specs[1:]] in (
        [],
        [(True, True)],
    )


def test_steps_send_the_key(tmp_path: Path) -> None:
    words = ("serve-config", NATIVE, "--runtime", "vllm", *KUBERNETES, "-o", tmp_path / "serve.yaml")
    assert "Bearer" not in run(*words).stdout
    steps = run(*words, *CLIENTS).stdout
    assert steps.count('-H "Authorization: Bearer $(cat api-key)"') == 2
    assert "kubectl get secret clients" in steps
    assert 'dflash-trt doctor "$url" --api-key-file api-key' in steps


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.parametrize(
    ("name", "runtime", "setting", "message"),
    [
        (NATIVE, "vllm", "nodes=2", "expected one of node-selector, tolerations"),
        (NATIVE, "vllm", "node-selector", "expected kubernetes.OPTION=VALUE"),
        (NATIVE, "vllm", "node-selector=a", "expected LABEL=VALUE,... as in nvidia.com/gpu.product"),
        (NATIVE, "vllm", "node-selector=a=b=c", "expected LABEL=VALUE"),
        (NATIVE, "vllm", "node-selector=a={b: c}", "expected LABEL=VALUE"),
        (NATIVE, "vllm", "tolerations=nvidia.com/gpu", "expected taints of nodes"),
        (NATIVE, "vllm", "tolerations=nvidia.com/gpu:noschedule", "expected taints of nodes"),
        (NATIVE, "vllm", "image-pull-secrets=a,,b", "expected names of Secrets"),
        (NATIVE, "vllm", "image-pull-secrets=A_b", "expected names of Secrets"),
        (NATIVE, "vllm", "api-key-secret=$(id)", "expected the name of a Secret"),
        (NATIVE, "vllm", "run-as-user=0", "expected a user's number above 0, or image"),
        (NATIVE, "vllm", "capabilities=ipc_lock", "expected capabilities to keep"),
        (NATIVE, "vllm", "pod-monitor=no", "expected yes, or labels"),
        (NATIVE, "trtllm", "api-key-secret=a", "trtllm-serve checks no key"),
        (NATIVE, "dynamo-trtllm", "api-key-secret=a", "not available for graphs of Dynamo's"),
        (NATIVE, "dynamo-trtllm", "pod-monitor=yes", "not available for graphs of Dynamo's"),
        ("two-nodes.yaml", "trtllm", "run-as-user=1000", "whose sshd runs as root"),
    ],
)
def test_refused(name: str, runtime: str, setting: str, message: str) -> None:
    launcher = () if runtime.startswith("dynamo") else KUBERNETES
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_here("serve-config", name, "--runtime", runtime, *launcher, "--set", f"kubernetes.{setting}")


@pytest.mark.parametrize("launcher", [(), ("--launcher", "slurm")])
def test_options_of_pods_are_for_pods(launcher: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError, match="is for --launcher kubernetes and dynamo runtimes"):
        run_here("serve-config", NATIVE, "--runtime", "vllm", *launcher, "--set", "kubernetes.pod-monitor=yes")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_two_nodes(Path(folder))
        for each in CASES:
            (GOLDEN / f"{each}.yaml").write_text(printed(each))
