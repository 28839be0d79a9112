# SPDX-License-Identifier: Apache-2.0
"""Turns a deployment file into settings, each with the place it came from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.pair import check_pair
from dflash_trt.deploy.batch_schedule import read_schedule
from dflash_trt.deploy.deployment_file import DeploymentFile
from dflash_trt.deploy.draft_methods import native_attention
from dflash_trt.deploy.gpus import GpuFacts, Gpus, parse_gpus
from dflash_trt.deploy.published import moe_backend
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.runtime_arguments import RuntimeArguments
from dflash_trt.deploy.schema import PACKAGES, Runtime
from dflash_trt.deploy.sizes import DraftSizes, TargetSizes, draft_sizes, target_sizes
from dflash_trt.engine.manifest import read_num_ranks
from dflash_trt.engine.shards import not_shared
from dflash_trt.errors import ConfigError
from dflash_trt.files.read import is_directory
from dflash_trt.quantize.recipe import load_recipe

UNQUANTIZED = "bf16"
BLOCK = ("block_size", "block_size - 1")
"""Proposals of a block, by the first row that proposes."""
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(DeploymentFile)}
UNRESOLVED = (
    "purpose", "mode", "recipe", "kv_cache_dtype", "kv_cache_fraction", "enable_attention_dp", "use_rejection_sampling",
    "trust_remote_code", "eagle3",
)  # fmt: skip
"""Settings that are taken as the file has them."""
PURPOSES = {
    "latency": {"max_batch_size": 64, "max_num_tokens": 16384, "max_seq_len": 32768},
    "throughput": {"max_batch_size": 256, "max_num_tokens": 16384, "max_seq_len": 16384},
}


def resolve(
    file: DeploymentFile, name: str, *, draft: str | None = None, target: str | None = None
) -> ResolvedDeployment:
    """Resolve `file`; `draft` and `target` are local directories in place of what it names.

    Raises ConfigError for unknown GPUs and for a draft whose facts are neither here nor published, CheckpointError
    where draft and target, read or published, do not fit each other.
    """
    sizes = _draft_sizes(draft or file.draft, name, file)
    partner = target_sizes(target or file.target, fetches=target is not None)
    if partner is not None:
        check_pair(sizes.spec, partner.spec, draft_name=sizes.name, target_name=partner.name)
    gpus = parse_gpus(file.gpus, f"{name}: gpus", file.gpu_facts or None)
    check_ranks(file, name, gpus, partner)
    sources = {"gpus": "file", "target": "--target" if target else "file"}
    sources |= {key: "default" if getattr(file, key) == DEFAULTS[key] else "file" for key in UNRESOLVED}
    served, sources["draft"] = _served_draft(file, name, draft)

    def choose(key: str, default: Any, why: str) -> Any:
        """Value of the file, else `default`; notes the source."""
        given = getattr(file, key)
        sources[key] = why if given is None else "file"
        return default if given is None else given

    num_ranks, sources["num_ranks"] = ranks_of_drafter(file, name, gpus, sizes.spec, served)
    experts = moe_backend(file.target, gpus.gpu.compute_capability)
    sources["moe_backend"] = "runtime's own choice" if experts is None else f"published for {gpus.gpu.sm}"
    num_draft_tokens = choose(
        "num_draft_tokens", sizes.spec.num_draft_tokens, f"{BLOCK[sizes.spec.first_proposing_row]}, {sizes.origin}"
    )
    lengths = choose("draft_schedule", {}, "num_draft_tokens for every batch")
    limits = {
        key: choose(key, default, f"default for {file.purpose}") for key, default in PURPOSES[file.purpose].items()
    }
    positions = [sizes.spec.max_position_embeddings, partner.spec.max_position_embeddings if partner else None]
    longest = min(filter(None, positions), default=limits["max_seq_len"])
    if file.max_seq_len is None and longest < limits["max_seq_len"]:
        limits["max_seq_len"], sources["max_seq_len"] = longest, "max_position_embeddings of draft and target"
    # Our plans read the worker's pool with kernels of their own, on any GPU.
    attention = choose(
        "draft_attention",
        "TRTLLM" if file.mode == "engine" else native_attention(sizes, gpus.gpu),
        f"{file.mode} mode on {gpus.gpu.sm}",
    )
    is_paired = pairs_pools(attention, file.kv_cache_dtype, partner) and not sizes.spec.is_dspark
    paired = "the drafter's pages go with the target's" if is_paired else "not known to reuse the drafter's pages"
    return ResolvedDeployment(
        **limits,
        file=file,
        name=name,
        digest=hashlib.sha256(msgspec.json.encode(file)).hexdigest()[:12],
        target=target or file.target,
        draft=served,
        checkpoint=file.draft,
        mode=file.mode,
        kv_cache_dtype=file.kv_cache_dtype,
        kv_cache_fraction=file.kv_cache_fraction,
        enable_attention_dp=file.enable_attention_dp,
        gpus=gpus,
        tensor_parallel=choose("tensor_parallel", gpus.count, f"all GPUs of {gpus}"),
        expert_parallel=choose("expert_parallel", 1, "default"),
        num_ranks=num_ranks,
        num_draft_tokens=num_draft_tokens,
        draft_schedule=read_schedule(lengths, num_draft_tokens, f"{name}: draft_schedule") if lengths else (),
        draft_attention=attention,
        prefix_reuse=choose("prefix_reuse", is_paired, paired),
        asked_prefix_reuse=file.prefix_reuse,
        moe_backend=experts,
        runtimes=_runtimes(file, name),
        runtime_arguments=file.runtime_arguments or RuntimeArguments(),
        accepted_warnings=file.accepted_warnings or {},
        draft_sizes=sizes,
        target_sizes=partner,
        algorithms=sizes.quantized or load_recipe(file.recipe).algorithms(sizes.spec.linear_modules()),
        sources=sources,
    )


def pairs_pools(draft_attention: str, kv_cache_dtype: str, target: TargetSizes | None) -> bool:
    """Whether TensorRT-LLM reuses the drafter's context pages with the target's.

    Its cache manager V2 pairs both pools (pull request 18093; dflash.py @ 8d62b3e5, `_ctx_reuse_addressable`), but not
    those of targets with recurrent states, and the worker takes no FP8 pool for BF16 rows. Read, not run.
    """
    has_pool = draft_attention == "TRTLLM" and kv_cache_dtype == "auto"
    return has_pool and target is not None and target.cache is not None and target.cache.recurrent is None


def draft_deployment(draft: str, *, target: str, gpus: str, gpu_facts: GpuFacts | None = None) -> DeploymentFile:
    """The deployment of a checkpoint, by directory or repository id, or an engine, every setting its default."""
    return DeploymentFile(
        description=f"{Path(draft).name} on {gpus}",
        target=target,
        draft=draft,
        gpus=gpus,
        gpu_facts=gpu_facts or msgspec.UNSET,
        purpose="latency",
        mode="native" if read_num_ranks(Path(draft)) is None else "engine",
    )


def _draft_sizes(draft: str, name: str, file: DeploymentFile) -> DraftSizes:
    sizes = draft_sizes(draft, fetches=True)
    if sizes is None:
        raise ConfigError(
            f"{name}: draft: expected a directory or a Hugging Face repository id, found {draft!r}",
            hint="check the path to the checkpoint",
        )
    if sizes.spec.is_dspark and file.mode == "engine":
        raise ConfigError(
            f"{name}: draft: engine mode does not support {sizes.spec.kind} drafts such as {draft}",
            hint="mode: native has the runtime's own drafter for it; or serve it here (dflash-trt serve)",
        )
    if sizes.spec.is_dspark and file.draft_schedule:
        raise ConfigError(
            f"{name}: draft_schedule: expected one draft length, which is all that is known of DSpark's methods, found"
            f" {len(file.draft_schedule)}",
            hint="remove draft_schedule",
        )
    return sizes


def _served_draft(file: DeploymentFile, name: str, draft: str | None) -> tuple[str, str]:
    """Drafter that TensorRT-LLM loads, and its source."""
    if draft is not None:
        return draft, "--draft"
    is_as_it_is = file.mode == "native" and file.recipe == UNQUANTIZED
    if is_as_it_is or (is_directory(file.draft) and read_num_ranks(Path(file.draft)) is not None):
        return file.draft, "file"
    return name, "directory that `dflash-trt build` writes"


def _runtimes(file: DeploymentFile, name: str) -> tuple[Runtime, ...]:
    runtimes = file.runtimes or tuple(PACKAGES)
    if file.enable_attention_dp and runtimes != ("trtllm",):
        raise ConfigError(
            f"{name}: enable_attention_dp: expected a deployment for TensorRT-LLM alone, found one for"
            f" {' and '.join(runtimes)}",
            hint="add runtimes: [trtllm]",
        )
    return runtimes


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
