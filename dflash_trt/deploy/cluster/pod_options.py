# SPDX-License-Identifier: Apache-2.0
"""`--set kubernetes.OPTION=VALUE`: where pods run, as whom, and with which Secrets.

The images' users: vLLM's has 2000 in group 0 and takes any other of that group (its docs/deployment/docker.md, since
vllm#40275); Dynamo's runs as 1000 in group 0 (container/templates of ai-dynamo/dynamo). TensorRT-LLM's and SGLang's are
built for root, and neither names another user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from dflash_trt.deploy.schema import Runtime
from dflash_trt.errors import ConfigError

PREFIX = "kubernetes"
USERS: dict[Runtime, int] = {"vllm": 2000}
DYNAMO_USER = 1000
USER_ENVIRONMENT = {"HOME": "/tmp", "USER": "server", "HF_MODULES_CACHE": "/tmp/modules"}  # noqa: S108 - a pod's own
NAME = r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?"
KEY = r"([a-z0-9.-]+/)?[A-Za-z0-9][\w.-]*"
LABEL = rf"{KEY}=[\w.-]*"
TAINT = rf"{KEY}(=[\w.-]*)?:(NoSchedule|NoExecute|PreferNoSchedule)"
CAPABILITY = r"[A-Z]+(_[A-Z]+)*"


class PodOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of pods, as Kubernetes takes them."""

    node_selector: dict[str, str] | None = None
    tolerations: list[dict[str, str]] | None = None
    image_pull_secrets: list[dict[str, str]] | None = None
    api_key_secret: str | None = None
    """Secret whose entry `key` clients must send."""
    run_as_user: int | None = None
    """User in group 0; None for the image's own."""
    capabilities: tuple[str, ...] = ()
    """Capabilities that containers keep."""
    pod_monitor: dict[str, str] | None = None
    """Labels of a PodMonitor; None for no PodMonitor."""

    @property
    def placement(self) -> dict[str, Any]:
        """Values of templates for a pod that needs a GPU."""
        return {
            "node_selector": self.node_selector,
            "tolerations": self.tolerations,
            "image_pull_secrets": self.image_pull_secrets,
        }

    @property
    def pod_security(self) -> dict[str, Any] | None:
        """securityContext of a pod whose user reads and writes volumes by its group."""
        return None if self.run_as_user is None else {"fsGroup": 0, "fsGroupChangePolicy": "OnRootMismatch"}

    def container_security(self, *needed: str) -> dict[str, Any]:
        """securityContext of a container that keeps the capabilities `needed`."""
        user, kept = self.run_as_user, list(dict.fromkeys((*needed, *self.capabilities)))
        return {
            **({} if user is None else {"runAsNonRoot": True, "runAsUser": user, "runAsGroup": 0}),
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], **({"add": kept} if kept else {})},
            "seccompProfile": {"type": "RuntimeDefault"},
        }

    @property
    def user_environment(self) -> list[dict[str, str]]:
        """Environment of a user that the image does not know, and who can write nothing but /tmp."""
        variables = {} if self.run_as_user is None else USER_ENVIRONMENT
        return [{"name": name, "value": value} for name, value in variables.items()]


def _several(item: str) -> str:
    return rf"{item}(,{item})*"


def _labels(value: str) -> dict[str, str]:
    return dict(each.split("=") for each in value.split(","))


def _toleration(taint: str) -> dict[str, str]:
    what, _, effect = taint.rpartition(":")
    key, equals, value = what.partition("=")
    return {
        "key": key,
        **({"operator": "Equal", "value": value} if equals else {"operator": "Exists"}),
        "effect": effect,
    }


FORMS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "node-selector": (_several(LABEL), "LABEL=VALUE,... as in nvidia.com/gpu.product=NVIDIA-B300", _labels),
    "tolerations": (
        _several(TAINT), "taints of nodes, KEY[=VALUE]:EFFECT,... as in nvidia.com/gpu:NoSchedule",
        lambda value: [_toleration(taint) for taint in value.split(",")],
    ),
    "image-pull-secrets": (
        _several(NAME), "names of Secrets, NAME,...", lambda value: [{"name": name} for name in value.split(",")],
    ),
    "api-key-secret": (NAME, "the name of a Secret", str),
    "run-as-user": (
        r"[1-9]\d{0,8}|image", "a user's number above 0, or image",
        lambda value: None if value == "image" else int(value),
    ),
    "capabilities": (
        _several(CAPABILITY), "capabilities to keep, as in IPC_LOCK,SYS_PTRACE", lambda value: tuple(value.split(",")),
    ),
    "pod-monitor": (
        f"yes|{_several(LABEL)}", "yes, or labels by which Prometheus finds it, as in release=prometheus",
        lambda value: {} if value == "yes" else _labels(value),
    ),
}  # fmt: skip
"""Pattern, its description and a reader, by option."""
NOT_OF_DYNAMO = ("api-key-secret", "run-as-user", "pod-monitor")


def pod_options(given: dict[str, str], runtime: Runtime, *, is_dynamo: bool) -> PodOptions:
    """Options of pods from the values that `--set kubernetes.OPTION=VALUE` gives, over the usual ones.

    Raises ConfigError for unknown options, other forms, and options that a server of `runtime`, alone or as a worker of
    Dynamo's, does not take.
    """
    options: dict[str, Any] = {"run_as_user": DYNAMO_USER if is_dynamo else USERS.get(runtime)}
    for option, value in given.items():
        name = f"--set {PREFIX}.{option}"
        if option not in FORMS:
            raise ConfigError(f"{name}: expected one of {', '.join(FORMS)}")
        if is_dynamo and option in NOT_OF_DYNAMO:
            raise ConfigError(f"{name}: not available for graphs of Dynamo's", hint="use --launcher kubernetes")
        if option == "api-key-secret" and runtime == "trtllm":
            raise ConfigError(f"{name}: trtllm-serve checks no key", hint="put a gateway that does in front of it")
        pattern, form, read = FORMS[option]
        if re.fullmatch(pattern, value, re.ASCII) is None:
            raise ConfigError(f"{name}: expected {form}, found {value!r}")
        options[option.replace("-", "_")] = read(value)
    return PodOptions(**options)
