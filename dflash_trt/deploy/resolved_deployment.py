# SPDX-License-Identifier: Apache-2.0
"""A deployment file with every setting resolved, and the views of it that checks and estimates read.

A configuration alone has the facts of ServedModels; the sizes of a ServingLoad decide memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dflash_trt.deploy.batch_schedule import Schedule
from dflash_trt.deploy.deployment_file import DEFAULT_SHARE, DeploymentFile, Eagle3, Method
from dflash_trt.deploy.gpus import Gpus
from dflash_trt.deploy.runtime_arguments import OF_DRAFTS, RuntimeArguments, from_pairs, merged
from dflash_trt.deploy.schema import Runtime
from dflash_trt.deploy.sizes import DraftSizes, TargetSizes
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.errors import ConfigError


class ServedModels(msgspec.Struct, frozen=True, kw_only=True):
    """Models, GPUs and mode of a server; None for what is not known."""

    target: str | None = None
    """Directory or repository id."""
    checkpoint: str | None = None
    """Repository id of the draft, even where a directory has it."""
    gpus: Gpus | None = None
    draft_sizes: DraftSizes | None = None
    target_sizes: TargetSizes | None = None
    algorithms: dict[str, str] = {}
    """Quantisation algorithm by linear layer of the served drafter."""
    mode: Literal["native", "engine"] = "native"
    num_ranks: int = 1
    """Ranks that share the drafter; natively all ranks unless attention is data-parallel."""
    asked_prefix_reuse: bool | None = None
    """Whether the deployment asks for a prefix cache, or for none."""


class ServingLoad(ServedModels, frozen=True, kw_only=True):
    """Models on known GPUs, with the sizes that decide memory; no draft is plain decoding."""

    gpus: Gpus
    tensor_parallel: int
    enable_attention_dp: bool = False
    """Whether each rank has whole attention layers and requests of its own; then experts alone are divided."""
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    num_draft_tokens: int
    draft_attention: str = ""
    """TensorRT-LLM's attention kernel of the drafter."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_cache_fraction: float = DEFAULT_SHARE
    """Share of the free memory that TensorRT-LLM's cache pool takes."""


MTP_DRAFT_TOKENS = 3
"""SGLang's own choice (0.5.23, arg_groups/speculative_hook.py, _auto_choose_speculative_params)."""
NGRAM_DRAFT_TOKENS = 5
"""Draft length of vLLM's own example (docs/features/speculative_decoding/n_gram.md)."""


class ResolvedDeployment(ServingLoad, frozen=True, kw_only=True):
    """A deployment file with every setting resolved."""

    file: DeploymentFile
    """Settings that need no resolution."""
    name: str
    digest: str
    """Hash of the file's settings."""
    target: str
    draft: str
    """Drafter that TensorRT-LLM loads: directory or repository id."""
    checkpoint: str
    """Draft checkpoint, for runtimes that cannot use our plans."""
    draft_sizes: DraftSizes
    expert_parallel: int
    draft_schedule: Schedule
    """K by batch; empty where it is num_draft_tokens for all."""
    prefix_reuse: bool
    """Prefix reuse of TensorRT-LLM with DFlash; `reuses_prefixes` has the other cases."""
    moe_backend: str | None
    runtimes: tuple[Runtime, ...]
    """Runtimes that can serve it."""
    runtime_arguments: RuntimeArguments
    """The file's arguments over those that are written; the drafts' are DFlash's."""
    settings: RuntimeArguments = RuntimeArguments()
    """The command line's over those, for the method that is asked for."""
    accepted_warnings: dict[str, str]
    """Reason by rule."""
    sources: dict[str, str]
    """Source of each setting."""

    @property
    def usual_runtime(self) -> Runtime:
        """TensorRT-LLM where it can serve this deployment, else the first that can."""
        return "trtllm" if "trtllm" in self.runtimes else self.runtimes[0]

    def reuses_prefixes(self, runtime: Runtime, method: Method) -> bool:
        """Whether the server reuses cached prefixes: as the file asks, by default if hits cost no drafts.

        Methods without a drafter keep their cache, as users have it. vLLM's hits leave a DFlash drafter without hidden
        states (vllm#47930, open); SGLang's and TensorRT-LLM's paired pools have the drafter's rows, too.
        """
        if self.asked_prefix_reuse is not None:
            return self.asked_prefix_reuse
        if method in ("none", "ngram") or (method in ("eagle3", "mtp") and runtime != "trtllm"):
            return True
        return {"trtllm": self.prefix_reuse, "vllm": False, "sglang": True}[runtime]

    def more_arguments(self, runtime: Runtime, method: Method) -> dict[str, Any]:
        """The runtime's arguments over those that are written.

        Raises ConfigError for words that are no arguments, and for a draft's that are set for plain decoding.
        """
        found = self.runtime_arguments.of(runtime, f"{self.name}: runtime_arguments.{runtime}")
        if method != "dflash":
            found = {key: value for key, value in found.items() if not key.startswith(OF_DRAFTS)}
        given = self.settings.of(runtime, "--set")
        if method == "none" and (of_drafts := [key for key in given if key.startswith(OF_DRAFTS)]):
            raise ConfigError(
                f"--set {of_drafts[0]}: --method none decodes without drafts",
                hint="leave it out, or give another --method",
            )
        return merged(found, given)

    def eagle3_drafter(self) -> Eagle3:
        """Drafter of `--method eagle3`; ConfigError where the file names none."""
        if self.file.eagle3 is None:
            raise ConfigError(
                f"{self.name}: missing key eagle3: expected the EAGLE-3 drafter to compare with",
                hint="add to the file: eagle3: {model: DIRECTORY_OR_REPOSITORY, num_draft_tokens: 3}",
            )
        return self.file.eagle3

    def draft_length(self, method: Method) -> int:
        """K of the method; ConfigError where the deployment has no draft for it."""
        match method:
            case "none":
                return 0
            case "dflash":
                return self.num_draft_tokens
            case _:
                return self.other_draft(method)[1]

    def other_draft(self, method: Literal["eagle3", "mtp", "ngram"]) -> tuple[str | None, int]:
        """Draft, None for the target's own MTP layers and for n-grams, and draft length.

        Raises ConfigError where the deployment has no such draft.
        """
        if method == "ngram":
            return None, self.file.ngram_draft_tokens or NGRAM_DRAFT_TOKENS
        if method == "eagle3":
            drafter = self.eagle3_drafter()
            return drafter.model, drafter.num_draft_tokens
        layers = None if self.target_sizes is None else self.target_sizes.num_mtp_layers
        if layers is None:
            raise ConfigError(
                f"{self.name}: target: whether {self.target} has MTP layers is not known",
                hint="give --target DIR, a directory with its config.json",
            )
        if not layers:
            raise ConfigError(
                f"{self.name}: target: expected MTP layers, found none in {self.target}",
                hint=f"compare with --method {'none' if self.file.eagle3 is None else 'eagle3'}",
            )
        return None, self.file.mtp_draft_tokens or MTP_DRAFT_TOKENS


def served_by(deployment: ResolvedDeployment, runtime: Runtime) -> ResolvedDeployment:
    """The deployment as a runtime serves it; engine mode is TensorRT-LLM's, the others load the plain checkpoint."""
    if deployment.mode == "native" or runtime == "trtllm":
        return deployment
    return msgspec.structs.replace(deployment, mode="native", algorithms={}, num_ranks=deployment.tensor_parallel)


def with_settings(deployment: ResolvedDeployment, runtime: Runtime, settings: Sequence[str]) -> ResolvedDeployment:
    """The deployment with KEY=VALUE arguments of a runtime over those of its file, and a digest of their own."""
    if not settings:
        return deployment
    digest = hashlib.sha256("\n".join((deployment.digest, *settings)).encode()).hexdigest()[:12]
    return msgspec.structs.replace(deployment, settings=from_pairs(runtime, settings), digest=digest)


def plan_sizes(deployment: ResolvedDeployment) -> PlanOptions:
    """Sizes that TensorRT plans of the deployment must serve.

    A slot of TensorRT-LLM's context arena has room for a block more than a sequence, whose length it has raised before
    by up to three blocks (overlapped steps; `_lazy_init_ctx_buffers`).
    """
    return PlanOptions(
        max_batch_size=deployment.max_batch_size,
        max_seq_len=deployment.max_seq_len + 4 * (deployment.num_draft_tokens + 1),
        max_num_tokens=deployment.max_num_tokens,
    )
