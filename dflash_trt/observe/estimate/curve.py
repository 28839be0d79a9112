# SPDX-License-Identifier: Apache-2.0
"""Throughput per GPU against tokens a second of one user, for each method over batch and draft length."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile
from dflash_trt.observe.estimate.shapes import Method
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.estimate.step_cost import StepLoad
from dflash_trt.observe.plots.frontier import rate_between

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int = 1024
    output_tokens: int = 1024

    @property
    def mean_context(self) -> float:
        """Tokens in a request's cache, averaged over its answer."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def max_tokens(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt_tokens + self.output_tokens


class OperatingPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run, in steady state."""

    method: Method
    batch: int
    num_draft_tokens: int
    tau: float
    step_seconds: float
    user_rate: float
    """Tokens a second of one user, prefill of the others included."""
    gpu_rate: float
    """Output tokens a second of one GPU."""


def point(
    model: StepModel, method: Method, acceptance: AcceptanceProfile | None, traffic: Traffic, batch: int,
    num_draft_tokens: int,
) -> OperatingPoint:  # fmt: skip
    """One way to run: B requests that are replaced as they end, their prompts processed during the others' steps.

    The prefill gives an answer's first token and each step one besides its drafts: with n tokens, no step accepts more
    than n - 2 drafts, so none has more.
    """
    num_draft_tokens = min(num_draft_tokens, max(0, traffic.output_tokens - 2))
    tau = 1.0 if acceptance is None or not num_draft_tokens else acceptance.tau(num_draft_tokens)
    load = StepLoad(batch=batch, num_draft_tokens=num_draft_tokens, context=traffic.mean_context)
    seconds = model.price(method, load).seconds
    # Whole prompts arrive every few steps; once every step has one, in ever larger chunks.
    arriving = batch * tau / traffic.output_tokens * traffic.prompt_tokens
    chunk = max(arriving, float(min(traffic.prompt_tokens, model.system.max_num_tokens)))
    mixed = msgspec.structs.replace(load, prompt_tokens=round(chunk), prompts=chunk / traffic.prompt_tokens)
    seconds += arriving / chunk * (model.price(method, mixed).seconds - seconds)
    rate = tau / seconds
    return OperatingPoint(
        method=method, batch=batch, num_draft_tokens=num_draft_tokens, tau=tau, step_seconds=seconds, user_rate=rate,
        gpu_rate=batch * rate / model.system.num_gpus,
    )  # fmt: skip


def points(
    model: StepModel, method: Method, acceptance: AcceptanceProfile | None, traffic: Traffic, max_batch: int,
    lengths: Sequence[int] | None = None,
) -> list[OperatingPoint]:  # fmt: skip
    """Every batch up to `max_batch` with every draft length of the method (all unless given)."""
    draft = model.system.drafter(method)
    chosen = (0,) if draft is None else lengths or range(1, draft.max_draft_tokens + 1)
    return [
        point(model, method, acceptance, traffic, batch, length)
        for batch in (size for size in BATCHES if size <= max_batch)
        for length in chosen
    ]


def rate_at(front: Sequence[OperatingPoint], user_rate: float) -> float:
    """Throughput per GPU of a frontier where users get `user_rate`, between points linearly; 0 beyond its end."""
    if not front or user_rate > front[0].user_rate:
        return 0.0
    rate = rate_between(front, user_rate)
    return front[-1].gpu_rate if rate is None else rate
