# SPDX-License-Identifier: Apache-2.0
"""Ranks of a deployment: of the target, and of its drafter."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.deploy.deployment_file import DeploymentFile
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.sizes import TargetSizes
from dflash_trt.engine.manifest import read_num_ranks
from dflash_trt.engine.shards import not_shared
from dflash_trt.errors import ConfigError


def check_ranks(file: DeploymentFile, name: str, gpus: Gpus, target: TargetSizes | None) -> None:
    """Raise ConfigError unless ranks have whole attention heads, use all GPUs, and divide the experts evenly."""
    ranks = file.tensor_parallel or gpus.count
    heads = target.num_attention_heads or 0 if target else 0  # 0: not known, and a multiple of everything
    key, found, expected = "tensor_parallel", ranks, ""
    fitting = [n for n in range(1, gpus.count + 1) if gpus.count % n == 0 and heads % n == 0]
    if gpus.count % ranks:
        expected = f"the {gpus.count} GPUs of {gpus}"
    elif target and heads % ranks:
        expected = f"the {heads} attention heads of {target.name}"
    elif ranks % (file.expert_parallel or 1):
        key, found, expected = "expert_parallel", file.expert_parallel or 1, f"the {ranks} ranks of tensor_parallel"
        fitting = [n for n in range(1, ranks + 1) if ranks % n == 0]
    if expected:
        raise ConfigError(
            f"{name}: {key}: expected a divisor of {expected}, found {found}",
            hint=f"set {key} to {' or '.join(map(str, fitting))}",
        )


def ranks_of_drafter(
    file: DeploymentFile, name: str, gpus: Gpus, draft: PartialDraftSpec, served: str
) -> tuple[int, str]:
    """Number of ranks that share the drafter, and its source; by default that of the engine `served`, if it is here.

    Raises ConfigError for ranks that cannot.
    """
    ranks, asked, expected = file.tensor_parallel or gpus.count, file.num_ranks, ""
    if file.mode == "native" and asked is not None:
        expected, fix = "none in native mode, whose runtime divides the drafter", "remove it"
        fix += ", or add mode: engine" if asked in (1, ranks) else ""
    elif asked not in (None, 1, ranks):
        expected, fix = f"1 or the {ranks} ranks of tensor_parallel", f"set num_ranks to 1 or {ranks}"
    elif file.enable_attention_dp and asked not in (None, 1):
        expected, fix = "1 beside enable_attention_dp, whose ranks have requests of their own", "set it to 1"
    if expected:
        raise ConfigError(f"{name}: num_ranks: expected {expected}, found {asked}", hint=fix)
    if asked is not None:
        if problem := not_shared(draft, asked):
            raise ConfigError(f"{name}: num_ranks: {problem}", hint="set num_ranks to 1")
        return asked, "file"
    if file.mode == "native":
        return 1 if file.enable_attention_dp else ranks, "as the runtime divides it"
    built = read_num_ranks(Path(served))
    return (1, "default") if built is None else (built, f"engine {served}")
