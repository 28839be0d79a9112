# SPDX-License-Identifier: Apache-2.0
"""Chooses settings for a deployment file and writes the file with them (`dflash-trt tune`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dflash_trt.deploy.deployment_file import DeploymentFile
from dflash_trt.deploy.resolve import DEFAULTS
from dflash_trt.deploy.runtime_arguments import merged
from dflash_trt.deploy.schema import Runtime
from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.curve import Traffic
from dflash_trt.observe.estimate.inputs import open_acceptances, open_system, read_deployment
from dflash_trt.observe.estimate.measured_points import measured_points
from dflash_trt.observe.estimate.tuning import Candidate, Fleet, Tuning, tune
from dflash_trt.observe.estimate.validation import summary
from dflash_trt.observe.pages.page_templates import Table

NO_MARGIN = 0.05
TUNED = "; tuned for "
WINDOW = 100
"""Requests over which TensorRT-LLM takes the accepted share of drafts: it turns drafting off for good."""
RECIPES = {"native": ("bf16", "nvfp4-native"), "engine": ("bf16", "fp8", "nvfp4")}


class TunedDeployment(msgspec.Struct, frozen=True, kw_only=True):
    tuning: Tuning
    acceptance_source: str
    num_gpus: int
    """GPUs of the deployment, or of all servers."""
    text: str
    """Text of the tuned deployment file."""
    validation: str
    """Accuracy of such predictions against published speeds."""


def tune_deployment(
    config: str, traffic: Traffic, *, slo: float, acceptance: Path | None, tau: float | None, runtime: Runtime,
    measured: Path | None, target: str | None, draft: str | None, gpus: int | None = None,
    request_rate: float | None = None,
) -> TunedDeployment:  # fmt: skip
    """The settings and their deployment file; raises ConfigError if none reaches `slo` or drafts do not pay.

    `measured` is a run that replaces the model.
    """
    file = read_deployment(config)
    # Settings chosen here do not affect the choice, so tuning a tuned deployment changes nothing.
    free: dict[str, int | None] = {"max_batch_size": None, "num_draft_tokens": None, "draft_schedule": None}
    deployment, system = open_system(config, runtime, target, draft, **free)
    if (longest := traffic.max_tokens) > deployment.max_seq_len:
        file, free["max_seq_len"] = msgspec.structs.replace(file, max_seq_len=longest), longest
        deployment, system = open_system(config, runtime, target, draft, **free)
    acceptances, source = open_acceptances(system, acceptance, tau)
    points = None if measured is None else measured_points(measured, system)
    has_fp4 = rates(system.gpu, runtime).fp4_flops > 0
    recipes = [recipe for recipe in RECIPES[deployment.mode] if has_fp4 or not recipe.startswith("nvfp4")]
    if points or deployment.draft_sizes.quantized:
        recipes = [deployment.file.recipe]
    if system.attention_dp:
        raise ConfigError(
            f"{deployment.name}: enable_attention_dp: expected tensor-parallel attention to tune, found true"
        )
    systems = {recipe: open_system(config, runtime, target, draft, **free, recipe=recipe)[1] for recipe in recipes}
    fleet = None
    if gpus is not None or request_rate is not None:
        fleet = Fleet(num_gpus=gpus, request_rate=request_rate, output_tokens=traffic.output_tokens)
    tuning = tune(
        systems, traffic, acceptances["dflash"], slo, measured=points,
        is_scheduled=runtime != "sglang", fleet=fleet,
    )  # fmt: skip
    if tuning.schedule[0][1] == 0:
        raise ConfigError(
            "tune: expected drafts to pay for one user, found plain decoding faster",
            hint="serve without a drafter: serve-config --method none",
        )
    num_gpus = system.num_gpus if fleet is None else tuning.best.tensor_parallel * tuning.replicas
    text = _text(file, tuning, runtime)
    return TunedDeployment(
        tuning=tuning, acceptance_source=source, num_gpus=num_gpus, text=text, validation=summary(system)
    )


def _text(file: DeploymentFile, tuning: Tuning, runtime: Runtime) -> str:
    """The deployment file with the chosen settings; others are unchanged."""
    import yaml

    best, gpu = tuning.best, file.gpus.rpartition("x")[0]
    values = msgspec.to_builtins(file)
    values |= {
        "description": f"{file.description.partition(TUNED)[0]}{TUNED}{tuning.slo:g} tokens/s/user",
        "gpus": f"{gpu}x{best.tensor_parallel}",
        "recipe": best.recipe,
        "tensor_parallel": best.tensor_parallel,
        "expert_parallel": best.expert_parallel,
        "max_batch_size": best.batch,
        "num_draft_tokens": tuning.schedule[0][1],
        "draft_schedule": dict(tuning.schedule) if len(tuning.schedule) > 1 else None,
    }
    if (file.num_ranks or 1) > 1:
        values["num_ranks"] = best.tensor_parallel if best.tensor_parallel > 1 else None
    if runtime == "trtllm" and (share := math.floor(1000 * tuning.break_even) / 1000):
        gate = {"acceptance_rate_window_size": WINDOW, "acceptance_rate_threshold": share}
        asked = {key: value for key, value in (values.get("runtime_arguments") or {}).items() if value}
        values["runtime_arguments"] = merged(asked, {"trtllm": {"speculative_config": gate}})
    keys = [field.encode_name for field in msgspec.structs.fields(DeploymentFile)]
    changed = {key: values[key] for key in keys if key in values and values[key] != DEFAULTS.get(key)}
    return str(yaml.safe_dump(changed, sort_keys=False, width=120, allow_unicode=True))


def tuning_tables(tuning: Tuning, source: str) -> Iterator[Table]:
    """The settings, best first, and the model next to measurements."""
    rows = tuple(_row(candidate) for candidate in (tuning.best, *tuning.others[:7]))
    columns = ("ranks", "recipe", "batch", "drafts", "tokens/s a user", "tokens/s a GPU", "limit")
    yield Table(title=f"settings for {tuning.slo:g} tokens/s/user; {source}", columns=columns, rows=rows)
    if tuning.measured:
        points = tuple(
            (str(p.measured.batch), str(p.measured.num_draft_tokens), f"{p.measured.user_rate:.0f}",
             f"{p.predicted_rate:.0f}", f"{p.error:+.0%}")
            for p in tuning.measured
        )  # fmt: skip
        yield Table(
            title="the model against what was measured, tokens/s/user", rows=points,
            columns=("batch", "drafts", "measured", "predicted", "error"),
        )  # fmt: skip


def tuning_lines(tuning: Tuning, runtime: str, num_gpus: int) -> Iterator[str]:
    """The best setting in words, and as the runtime's arguments."""
    user, gpu = tuning.user_rate, tuning.gpu_rate
    yield f"best: {user.value:.0f} tokens/s/user ({user.low:.0f} to {user.high:.0f} over constants' ranges)"
    yield f"      {gpu.value:.0f} tokens/s/GPU ({gpu.low:.0f} to {gpu.high:.0f})"
    margins = [rate / tuning.slo - 1 for rate in (user.value, user.low)]
    yield f"margin: {margins[0]:+.1%} over --slo, {margins[1]:+.1%} at the band's low end"
    if margins[0] < NO_MARGIN:
        yield "  less than 5% is no margin: ask for a higher --slo"
    if tuning.model_error is not None:
        yield (
            f"{len(tuning.measured)} measured points replace the model (median error {tuning.model_error:.0%});"
            f" elsewhere it is scaled by {tuning.model_factor:.2f}"
        )
    if (count := tuning.replicas) > 1:
        best = tuning.best
        rate = count * best.batch * best.user_rate
        yield f"{count} servers on {count * best.tensor_parallel} GPUs: {rate:,.0f} tokens/s, evenly divided"
    elif (ranks := tuning.best.tensor_parallel) < num_gpus:
        yield f"the file is for {ranks} of the {num_gpus} GPUs: serve it {num_gpus // ranks} times"
    first = tuning.schedule[0][1]
    lengths = ", ".join(f"{length} from {batch}" for batch, length in tuning.schedule)
    arguments = {
        "trtllm": f"max_draft_len {first}; by batch: {lengths}",
        "vllm": f"num_speculative_tokens {first}; by batch: {lengths}",
        "sglang": f"block of {first + 1} (speculative_num_draft_tokens)",
    }
    yield f"{runtime}: {arguments[runtime]}"


def _row(candidate: Candidate) -> tuple[str, ...]:
    return (
        f"TP {candidate.tensor_parallel}, EP {candidate.expert_parallel}", candidate.recipe, str(candidate.batch),
        str(candidate.num_draft_tokens), f"{candidate.user_rate:.0f}", f"{candidate.gpu_rate:.0f}",
        candidate.limit.partition(":")[0],
    )  # fmt: skip
