# SPDX-License-Identifier: Apache-2.0
"""What a prediction is made from: a deployment's system, acceptance by method, and the routing of experts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.deploy.deployment_file import DeploymentFile, deployment_path, load_deployment
from dflash_trt.deploy.resolve import ResolvedDeployment, resolve
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile, from_tau, read_acceptance, read_routing
from dflash_trt.observe.estimate.constants import DATA, constants
from dflash_trt.observe.estimate.inputs import system
from dflash_trt.observe.estimate.routing import inclusion
from dflash_trt.observe.estimate.shapes import Method, System

ROUTINGS = ("power-law", "uniform")
EAGLE3_DRAFTS = 3


def read_deployment(config: str) -> DeploymentFile:
    """The deployment file that CONFIG names; raises ConfigError."""
    if (path := deployment_path(config)) is None:
        raise ConfigError(
            f"{config}: expected a deployment's file (.yaml) or name, found neither",
            hint="dflash-trt serve-config --list",
        )
    return load_deployment(path)


def open_system(
    config: str, runtime: str, target: str | None, draft: str | None, **changes: object
) -> tuple[ResolvedDeployment, System]:
    """The resolved deployment that CONFIG names, some of its settings changed, and what the model makes of it."""
    file = msgspec.structs.replace(read_deployment(config), **changes)
    deployment = resolve(file, Path(config).stem if config.endswith(".yaml") else config, draft=draft)
    return deployment, system(deployment, runtime, target)


def published_tau(of: System) -> str | None:
    """What the draft's card or paper reports, in words."""
    taus = read_json(DATA / "published_taus.json", dict[str, str], ConfigError, what="the package's data")
    return None if of.draft is None else taus.get(of.draft.name)


def open_acceptances(
    of: System, file: Path | None, tau: float | None, eagle3_tau: float | None = None
) -> tuple[dict[Method, AcceptanceProfile], str]:
    """Acceptance by method from the document of `verify --json` or from one tau, and in words where it is from."""
    assert of.draft is not None
    length = of.draft.max_draft_tokens
    eagle3 = constants().eagle3["eagle3_acceptance"].value
    by_method: dict[Method, AcceptanceProfile] = {
        "eagle3": AcceptanceProfile((eagle3,)) if eagle3_tau is None else from_tau(eagle3_tau, EAGLE3_DRAFTS)
    }
    if file is not None:
        return {**by_method, "dflash": read_acceptance(file)}, f"measured, {file}"
    assert tau is not None, "one of both is given"
    source = f"tau {tau:g} at {length} drafts, every position accepted equally often"
    return {**by_method, "dflash": from_tau(tau, length)}, source


def open_routing(text: str, of: System) -> list[float] | None:
    """The probability that a token takes each expert; None: the power law of the constants."""
    target = of.target
    if text == "power-law" or not target.num_experts:
        return None
    if text == "uniform":
        return [target.top_k / target.num_experts] * target.num_experts
    if not Path(text).is_file():
        raise ConfigError(f"--routing: expected {', '.join(ROUTINGS)} or a JSON file, found {text!r}")
    return list(inclusion(read_routing(Path(text), target.num_experts), target.top_k))
