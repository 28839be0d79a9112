# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build`: a draft is quantised and given a head of its own where that is asked for, then written."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import msgspec

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_spec import D2T, HEAD
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.proposal_head import HeadChoice, with_head
from dflash_trt.engine.write import build_engine, check_output, describe_source, describe_target
from dflash_trt.files.write import scratch_directory
from dflash_trt.quantize.bounds import Ranges
from dflash_trt.quantize.convert import Summary, quantize_checkpoint
from dflash_trt.quantize.recipe import Recipe


class BuildJob(msgspec.Struct, frozen=True, kw_only=True):
    """A pair that fits, and what becomes of the draft."""

    name: str
    """What the user called the draft."""
    draft: DraftCheckpoint
    target: TargetCheckpoint
    target_name: str
    """What the user called it."""
    recipe: Recipe | None = None
    recipe_name: str | None = None
    """As the user gave it."""
    ranges: Ranges | None = None
    head: HeadChoice | None = None
    head_tokens: Path | None = None
    """Features whose answers say which tokens a trimmed head keeps."""
    plan_options: PlanOptions | None = None
    """What plans, built now or later, are to serve."""
    num_ranks: int = 1
    """Ranks that share the drafter."""


class HeadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """An own head."""

    num_tokens: int
    num_bytes: int
    kept_shares: dict[str | None, float]
    """Share of the captured answers' tokens that a trimmed head proposes, by language; under None of all."""


def run_build(
    job: BuildJob, output: Path, *, force: bool, keep_plans: bool
) -> tuple[Summary | None, HeadSummary | None]:
    """Writes the engine directory `output`, and says what was quantised and which head was added.

    Raises as `quantize_checkpoint`, `with_head` and `build_engine` do.
    """
    check_output(output, force=force)
    quantized: Summary | None = None
    head: HeadSummary | None = None
    with ExitStack() as stack:
        checkpoint = job.draft
        if job.recipe is not None:
            scratch = stack.enter_context(scratch_directory(output))
            quantized = quantize_checkpoint(checkpoint, job.recipe, scratch, ranges=job.ranges)
            checkpoint = read_draft(scratch)
        if job.head is not None:
            scratch = stack.enter_context(scratch_directory(output))
            checkpoint, head = _with_head(checkpoint, job, job.head, scratch)
        build_engine(
            checkpoint,
            job.target,
            output,
            source=describe_source(job.draft, job.name, job.recipe_name),
            target_source=describe_target(job.target, job.target_name),
            force=force,
            plan_options=job.plan_options,
            keep_plans=keep_plans,
            num_ranks=job.num_ranks,
        )
    return quantized, head


def _with_head(
    draft: DraftCheckpoint, job: BuildJob, choice: HeadChoice, directory: Path
) -> tuple[DraftCheckpoint, HeadSummary]:
    """The draft with a head of its own, in a new `directory`."""
    token_ids, shares = None, {}
    if choice.num_tokens is not None and job.head_tokens is not None:
        from dflash_trt.runtime.measure.features import captured_tokens, kept_shares  # it loads torch

        token_ids = captured_tokens(draft.spec, job.head_tokens, job.target.directory, choice.num_tokens)
        shares = kept_shares(draft.spec, job.head_tokens, token_ids)
    built = with_head(draft, job.target, choice, token_ids, directory)
    size = sum(tensor.num_bytes for name, tensor in built.weights.items() if name.startswith((f"{HEAD}.", D2T)))
    num_tokens = built.spec.draft_vocab_size or job.target.spec.vocab_size
    return built, HeadSummary(num_tokens=num_tokens, num_bytes=size, kept_shares=shares)
