# SPDX-License-Identifier: Apache-2.0
"""Deployment configurations: the YAML files of build_configs/, and arguments that no key of theirs stands for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from dflash_trt.deploy.flags import parse_arguments
from dflash_trt.deploy.gpus import GpuFacts
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.errors import ConfigError, EngineError
from dflash_trt.files.command import command_line, quoted
from dflash_trt.files.strict_yaml import closest, load_yaml, yaml_document
from dflash_trt.quantize.recipe import recipe_directory

OWN = {"model", "model_tag", "model_path", "host", "port"}
"""Arguments that target, --host and --port decide."""
OF_DRAFTS = "speculative"
"""Beginning of the names of arguments that plain decoding and other methods do not get."""


class RuntimeArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Arguments by runtime, beside and over those that are written."""

    vllm: tuple[str, ...] = ()
    """Flags and values, one or several words each."""
    sglang: tuple[str, ...] = ()
    trtllm: dict[str, Any] = {}
    """Keys of the YAML file, those of sections below them."""

    def of(self, runtime: Runtime, method: str, name: str) -> dict[str, Any]:
        """The arguments of a runtime by name; only with DFlash those of drafts.

        Raises ConfigError, in the name of the deployment, for words that are no arguments, and for the model's.
        """
        if runtime == "trtllm":
            found = self.trtllm
        else:
            words = [word for text in getattr(self, runtime) for word in shlex.split(text)]
            found, findings = parse_arguments(words, load_schema(runtime))
            if findings:
                raise ConfigError(f"{name}: runtime_arguments.{runtime}: {findings[0]}")
        if decided := sorted(OWN & found.keys()):
            raise ConfigError(
                f"{name}: runtime_arguments.{runtime}: expected arguments that nothing else decides, found"
                f" {decided[0]}",
                hint="give target in the deployment, or --host and --port",
            )
        return {key: value for key, value in found.items() if method == "dflash" or not key.startswith(OF_DRAFTS)}


def with_pairs(arguments: RuntimeArguments, runtime: Runtime, settings: Sequence[str]) -> RuntimeArguments:
    """`arguments` with KEY=VALUE over them, KEY.KEY=VALUE for those of a section; ConfigError for another form."""
    added: dict[str, Any] = {}
    words: list[str] = []
    for setting in settings:
        key, is_joined, value = setting.partition("=")
        if not is_joined or not key:
            raise ConfigError(f"--set: expected KEY=VALUE, found {setting!r}")
        words.append(command_line([f"--{key.lstrip('-').replace('_', '-')}", value]))
        added = merged(added, nested(key, yaml_document(value, Path("--set"), ConfigError)))
    if runtime == "trtllm":
        return msgspec.structs.replace(arguments, trtllm=merged(arguments.trtllm, added))
    return msgspec.structs.replace(arguments, **{runtime: (*getattr(arguments, runtime), *words)})


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`, mapping by mapping."""
    result = dict(below)
    for key, value in above.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result


def nested(path: str, value: Any) -> dict[str, Any]:
    """A mapping with the value at a dotted path."""
    outer, _, inner = path.partition(".")
    return {outer: nested(inner, value) if inner else value}


Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
Method = Literal["dflash", "eagle3", "none"]
"""The decoding methods that a deployment can be served with."""
METHODS: tuple[Method, ...] = ("dflash", "eagle3", "none")
Fraction = Annotated[float, msgspec.Meta(gt=0, lt=1)]


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
    kv_cache_fraction: Fraction = 0.9
    """Share of the free memory that TensorRT-LLM's cache pool takes; 0.9 is its own default (KvCacheConfig)."""
    enable_attention_dp: bool = False
    """TensorRT-LLM: attention by data parallelism, each rank with requests of its own; False as in NVIDIA's
    gpt-oss-120b-latency.yaml, true in its gpt-oss-120b-throughput.yaml (examples/configs/curated @ 25f307ee)."""
    use_rejection_sampling: bool = False
    """TensorRT-LLM: drafts are sampled and accepted by ratio of probabilities; otherwise a draft is accepted where it
    is the token that the target samples, at temperature > 0, too."""
    trust_remote_code: bool = False
    """Whether Python that comes with the target's repository is run."""
    eagle3: Eagle3 | None = None
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
    default only where TensorRT-LLM reuses its pages with the target's (`resolve.pairs_pools`)."""
    runtimes: Annotated[tuple[Runtime, ...], msgspec.Meta(min_length=1)] | None = None
    """Runtimes that can serve it; all by default."""
    runtime_arguments: RuntimeArguments | msgspec.UnsetType = msgspec.UNSET
    """Arguments of runtimes that no other key stands for; they win."""
    accepted_warnings: dict[str, str] | None = None
    """Rules whose warnings `serve-config --strict` lets pass, each with the reason."""


def shipped_deployments() -> dict[str, Path]:
    """The deployment files that come with the package, by name."""
    files = {file.stem: file for file in recipe_directory().parent.glob("*.yaml")}
    return dict(sorted(files.items()))


def refuse_deployment(name: str | Path) -> None:
    """Raises EngineError where an engine directory is expected and `name` is a deployment, which runs elsewhere."""
    if deployment_path(str(name)) is not None:
        raise EngineError(
            f"expected an engine directory, found the deployment {name}",
            hint=f"dflash-trt serve-config {quoted(Path(name))} --runtime trtllm",
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


def load_deployment(file: Path) -> DeploymentFile:
    """Raises ConfigError when the file is not a deployment; an unknown, missing or mistyped key is named."""
    return load_yaml(file, DeploymentFile, ConfigError)
