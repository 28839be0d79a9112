# SPDX-License-Identifier: Apache-2.0
"""Deployment configurations: the YAML files of build_configs/."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dflash_trt.deploy.gpus import GpuFacts
from dflash_trt.deploy.runtime_arguments import RuntimeArguments
from dflash_trt.deploy.schema import TITLES, Runtime
from dflash_trt.errors import ConfigError, EngineError
from dflash_trt.files.command import quoted
from dflash_trt.files.read import is_directory, is_file
from dflash_trt.files.strict_yaml import closest, load_yaml
from dflash_trt.quantize.recipe import FP8_KV, recipe_directory

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Method = Literal["dflash", "eagle3", "mtp", "ngram", "none"]
"""The decoding methods that a deployment can be served with."""
METHODS: tuple[Method, ...] = ("dflash", "eagle3", "mtp", "ngram", "none")
Fraction = Annotated[float, msgspec.Meta(gt=0, lt=1)]
DEFAULT_SHARE = 0.9
"""TensorRT-LLM's own default (KvCacheConfig)."""


class Eagle3(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The EAGLE-3 drafter that `--method eagle3` compares with."""

    model: str
    """Directory or Hugging Face repository id."""
    num_draft_tokens: Positive = 3


class DeploymentFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A deployment's YAML file; missing settings are resolved from the purpose, the GPU and the draft."""

    target: Name
    """Directory or Hugging Face repository id."""
    draft: Name
    """The DFlash draft checkpoint: directory or Hugging Face repository id."""
    purpose: Literal["latency", "throughput"]
    mode: Literal["native", "engine"] = "native"
    """native: the runtime loads the draft checkpoint. engine: TensorRT-LLM calls our TensorRT plans."""
    recipe: str = "bf16"
    """Quantisation recipe of the drafter; bf16 serves the checkpoint as it is."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Type of the target's cache and of the drafter's context cache."""
    kv_cache_fraction: Fraction = DEFAULT_SHARE
    """Share of the free memory that TensorRT-LLM's cache pool takes."""
    enable_attention_dp: bool = False
    """TensorRT-LLM: attention by data parallelism, each rank with requests of its own; False as in NVIDIA's
    gpt-oss-120b-latency.yaml, true in its gpt-oss-120b-throughput.yaml (examples/configs/curated @ 25f307ee)."""
    use_rejection_sampling: bool = False
    """TensorRT-LLM: drafts are sampled and accepted by ratio of probabilities; otherwise a draft is accepted where it
    is the token that the target samples, at temperature > 0, too."""
    trust_remote_code: bool = False
    """Whether Python that comes with the target's repository is run."""
    eagle3: Eagle3 | None = None
    mtp_draft_tokens: Positive | msgspec.UnsetType = msgspec.UNSET
    """Draft length of `--method mtp`, the target's own multi-token-prediction layers."""
    ngram_draft_tokens: Positive | msgspec.UnsetType = msgspec.UNSET
    """Draft length of `--method ngram`, which continues tokens as they went on before."""
    description: str
    gpus: str
    """GPU and count, b300x8; more than a node's are whole nodes."""
    gpu_facts: GpuFacts | msgspec.UnsetType = msgspec.UNSET
    """Facts of a GPU that the package does not know, in place of them."""
    tensor_parallel: Positive | None = None
    """Ranks that share every layer; all GPUs by default."""
    expert_parallel: Positive | None = None
    """Ranks among which whole experts are divided."""
    num_ranks: Positive | None = None
    """Engine mode: ranks that share the drafter's heads and MLPs, all of tensor_parallel, or 1: each has all of them.
    Natively the runtime divides the drafter among all."""
    max_batch_size: Positive | None = None
    """Requests that run at once."""
    max_num_tokens: Positive | None = None
    """Tokens of one forward pass, prefill and verification together."""
    max_seq_len: Positive | None = None
    """Tokens of a request, prompt and answer together; sizes the context cache."""
    num_draft_tokens: Positive | None = None
    """K, proposals per step; block_size - 1 by default."""
    draft_schedule: dict[Positive, Count] | None = None
    """K by smallest batch, where it varies: {1: 9, 17: 4, 65: 0}. 0 decodes plainly."""
    draft_attention: Literal["VANILLA", "TRTLLM", "FA4"] | None = None
    """TensorRT-LLM's attention kernel of the native drafter."""
    prefix_reuse: bool | None = None
    """Reuse of cached prompt prefixes. Reused rows never pass the target, so the drafter misses their context: by
    default only where TensorRT-LLM reuses its pages with the target's (`resolve.py`, pairs_pools)."""
    runtimes: Annotated[tuple[Runtime, ...], msgspec.Meta(min_length=1)] | None = None
    """Runtimes that can serve it; all by default."""
    runtime_arguments: RuntimeArguments | msgspec.UnsetType = msgspec.UNSET
    """Arguments of runtimes that no other key stands for; they win."""
    accepted_warnings: dict[str, str] | None = None
    """Rules whose warnings `serve-config --strict` lets pass, each with the reason."""


def load_deployment(file: Path) -> DeploymentFile:
    """The deployment in `file`, with paths that are relative to the file made so to the working directory.

    A name that is nothing beside the file stays as it is, a repository id or a recipe's name. Raises ConfigError when
    the file is not a deployment; an unknown, missing or mistyped key is named.
    """
    loaded = load_yaml(file, DeploymentFile, ConfigError)
    names = {key: _from_here(getattr(loaded, key), file) for key in ("target", "draft", "recipe")}
    eagle3 = loaded.eagle3
    if eagle3 is not None:
        eagle3 = msgspec.structs.replace(eagle3, model=_from_here(eagle3.model, file))
    return msgspec.structs.replace(loaded, **names, eagle3=eagle3)


def _from_here(name: str, file: Path) -> str:
    """`name` as a path from the working directory, where a directory or file of that name lies beside `file`."""
    beside = str(file.parent / name)
    return beside if is_directory(beside) or is_file(beside.removesuffix(FP8_KV)) else name


def check_runtime(file: DeploymentFile, name: str, runtime: Runtime) -> None:
    """Raises ConfigError for a runtime that the deployment's `runtimes` leaves out."""
    if file.runtimes is not None and runtime not in file.runtimes:
        others = " or ".join(TITLES[each] for each in file.runtimes)
        raise ConfigError(
            f"{name} cannot be served by {TITLES[runtime]}, only by {others}",
            hint=f"serve-config --runtime {file.runtimes[0]} writes its configuration; the deployment's file says why",
        )


def shipped_deployments() -> dict[str, Path]:
    """The deployment files that come with the package, by name."""
    files = {file.stem: file for file in recipe_directory().parent.glob("*.yaml")}
    return dict(sorted(files.items()))


def refuse_deployment(name: str | Path) -> None:
    """Raises EngineError where an engine directory is expected and `name` is a deployment, which runs elsewhere."""
    if (file := deployment_path(str(name))) is not None:
        runtime = (load_deployment(file).runtimes or ("trtllm",))[0]
        raise EngineError(
            f"{name} is a deployment, not an engine directory",
            hint=f"dflash-trt serve-config {quoted(Path(name))} --runtime {runtime}",
        )


def deployment_path(name: str) -> Path | None:
    """The deployment file that a command's argument names, by its path or as one that comes with the package.

    None for a checkpoint or an engine; what lies here comes before a shipped deployment of the same name. Raises
    ConfigError for a file that is nowhere, the beginning of shipped names, and a word that resembles one.
    """
    path, shipped = Path(name), shipped_deployments()
    is_file = path.suffix in (".yaml", ".yml")
    try:
        if path.exists():
            return path if is_file else None
    except OSError:  # no name of a file, too long for one
        return None
    stem = name.removesuffix(".yaml")
    if stem in shipped:
        return shipped[stem]
    if begun := [each for each in shipped if each.startswith(f"{stem}.")]:
        raise ConfigError(
            f"{name}: expected the whole name of a deployment, found the beginning of {len(begun)}",
            hint=f"one of {', '.join(begun)}",
        )
    near = closest(stem, shipped, "name")
    if is_file or (near and "/" not in name):
        raise ConfigError(
            f"{name}: neither a path here nor the name of a shipped deployment{near}",
            hint="dflash-trt serve-config --list",
        )
    return None
