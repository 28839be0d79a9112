# SPDX-License-Identifier: Apache-2.0
"""The cost model's inputs from deployments, checkpoints and published facts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.deploy.catalog import known_deployments
from dflash_trt.deploy.deployment_file import DeploymentFile, check_runtime, deployment_path, load_deployment
from dflash_trt.deploy.memory import is_fp8_context
from dflash_trt.deploy.published import published_targets
from dflash_trt.deploy.read_target_shape import read_target_shape
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment, served_by
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.sizes import checkpoint_place, shape_sizes
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.engine.plans.machine import check_precision
from dflash_trt.errors import ConfigError
from dflash_trt.files.strict_yaml import closest
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile, from_tau, read_acceptance, read_routing
from dflash_trt.observe.estimate.constants import constants
from dflash_trt.observe.estimate.drafter_pass import backend_of, dflash_shape
from dflash_trt.observe.estimate.expert_routing import inclusion
from dflash_trt.observe.estimate.shapes import DraftShape, Gemm, Method, System

MAX_EAGLE3_DRAFTS = 5
ROUTINGS = ("power-law", "uniform")
EAGLE3_DRAFTS = EAGLE3_TAPS = 3


def target_shape(name: str, *, fetches: bool = False) -> TargetShape:
    """A target by directory or repository id; raises ConfigError, with the list, for one that is not known.

    With `fetches`, an unknown repository's configuration is fetched, unless the hub's cache has it.
    """
    shapes = published_targets()
    if (directory := checkpoint_place(name, fetches=fetches and name not in shapes)) is not None:
        return read_target_shape(directory)
    if name not in shapes:
        raise ConfigError(
            f"the layers of target {name!r} are unknown{closest(name, shapes, 'target')}"
            f" (known: {', '.join(sorted(shapes))})",
            hint="give it with --target, as a directory or repository id; only its config.json is read",
        )
    return shapes[name]


def system(deployment: ResolvedDeployment, runtime: Runtime, *, fetches: bool = False) -> System:
    """The system of a deployment under a runtime; raises ConfigError for a target or links that are not known.

    `fetches` as for `target_shape`.
    """
    target, draft = target_shape(deployment.target, fetches=fetches), deployment.draft_sizes
    gpus = deployment.gpus
    if gpus.nodes > 1:
        raise ConfigError(
            f"{deployment.name}: expected GPUs of one node, found {gpus}: what the network between nodes takes for an"
            " all-reduce is not among the constants",
            hint="estimate a deployment of one node; --replicas counts servers",
        )
    if gpus.count > 1 and not gpus.gpu.link_bandwidth:
        raise ConfigError(
            f"{deployment.name}: gpu_facts: expected link, GB/s between two of {gpus}, found none",
            hint="add the rate of NVLink or PCIe in one direction",
        )
    served = served_by(deployment, runtime)
    if served.mode == "engine":
        check_precision(set(served.algorithms.values()))  # a GPU that lacks one is the rules' matter
    # The target's bytes are those of its shape, so that time and memory go together.
    load = msgspec.structs.replace(
        served, target_sizes=shape_sizes(target), draft_sizes=msgspec.structs.replace(draft, checkpoint=None)
    )
    backend = backend_of(runtime, is_plan=served.mode == "engine")
    return System(
        target=target,
        draft=dflash_shape(draft.spec, load.algorithms, name=draft.name, backend=backend),
        eagle3=eagle3_shape(target), gpu=gpus.gpu, gpu_memory_bytes=gpus.gpu.memory_bytes, num_gpus=gpus.count,
        tensor_parallel=deployment.tensor_parallel, expert_parallel=deployment.expert_parallel,
        drafter_ranks=load.num_ranks, runtime=runtime, attention_dp=load.enable_attention_dp,
        kv_bytes=1 if load.kv_cache_dtype == "fp8" else 2,
        draft_kv_bytes=1 if is_fp8_context(load, load_schema(runtime)) else 2,
        max_batch_size=deployment.max_batch_size, max_seq_len=deployment.max_seq_len,
        max_num_tokens=deployment.max_num_tokens, memory=load,
    )  # fmt: skip


def eagle3_shape(target: TargetShape) -> DraftShape:
    """An EAGLE-3 drafter for a target: one layer of the target's head shapes, three taps; the rest is assumed."""
    assumed = constants().eagle3
    # Latent attention's row is no head: EAGLE-3 gets heads as wide as its values, and the usual eight of K and V.
    heads, head_dim = target.cache.num_key_value_heads, target.cache.head_dim
    if target.latent is not None:
        heads, head_dim = min(8, target.num_attention_heads), target.latent.v_head_dim
    H, queries = target.hidden_size, target.num_attention_heads * head_dim
    # The layer reads the embedding beside the hidden state.
    layer = 2 * H * (queries + 2 * heads * head_dim) + queries * H
    layer += 3 * H * round(assumed["eagle3_intermediate_ratio"].value * H)
    return DraftShape(
        name="EAGLE-3 (assumed shape)", num_layers=1, hidden_size=H, num_key_value_heads=heads,
        head_dim=head_dim, num_taps=EAGLE3_TAPS, max_draft_tokens=MAX_EAGLE3_DRAFTS,
        gemms={"tap projection": (Gemm(EAGLE3_TAPS * H * H),), "layers": (Gemm(layer, kernels=4),)},
        head_rows=min(target.vocab_size, round(assumed["eagle3_head_rows"].value)), is_chain=True,
    )  # fmt: skip


def read_deployment(config: str) -> DeploymentFile:
    if (path := deployment_path(config)) is None:
        names = known_deployments(config)
        raise ConfigError(
            f"{config} is neither a deployment file (.yaml) nor the name of a deployment",
            hint=f"one of them: {', '.join(names)}" if names else "dflash-trt serve-config --list",
        )
    return load_deployment(path)


def default_runtime(config: str) -> Runtime:
    """TensorRT-LLM, where the deployment that CONFIG names is for it; else the first that it is for."""
    runtimes = read_deployment(config).runtimes
    return runtimes[0] if runtimes and "trtllm" not in runtimes else "trtllm"


def open_system(
    config: str, runtime: Runtime, target: str | None, draft: str | None, **changes: object
) -> tuple[ResolvedDeployment, System]:
    """The resolved deployment that CONFIG names, with some settings changed, and its inputs to the model."""
    file = msgspec.structs.replace(read_deployment(config), **changes)
    check_runtime(file, config, runtime)
    deployment = resolve(file, Path(config).stem if config.endswith(".yaml") else config, draft=draft, target=target)
    return deployment, system(deployment, runtime, fetches=target is not None)


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
        return {**by_method, "dflash": read_acceptance(file, length)}, f"measured, {file}"
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
