# SPDX-License-Identifier: Apache-2.0
"""A drafter that is whole on every GPU, and one whose heads and MLPs the GPUs share: time and memory of both.

Shared, a GPU reads its part of the layers and of the context, and pays two all-reduces a layer. Natively TensorRT-LLM
shares them; for our plans num_ranks says it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash_trt.deploy.memory import ServingLoad
from dflash_trt.deploy.sizes import DraftSizes
from dflash_trt.observe.estimate.constants import rates
from dflash_trt.observe.estimate.drafter_pass import dflash_shape
from dflash_trt.observe.estimate.step import StepLoad, drafter_terms


class DrafterOnRanks(msgspec.Struct, frozen=True, kw_only=True):
    ranks: int
    """GPUs that share it; 1: it is whole on each."""
    is_deployed: bool
    """Whether the deployment's drafter is this one."""
    seconds: dict[int, float]
    """Seconds of a pass that proposes all drafts, by batch; without lm_head, which costs both the same."""
    weight_bytes: int
    """On one GPU."""
    context_bytes: int
    """On one GPU, of one request of max_seq_len tokens."""

    @property
    def name(self) -> str:
        place = "whole on each GPU" if self.ranks == 1 else f"shared by {self.ranks} GPUs"
        return f"{place} (as deployed)" if self.is_deployed else place


def drafters_on_ranks(load: ServingLoad, context: float) -> list[DrafterOnRanks]:
    """Whole and shared, at batch 1 and max_batch_size, each request with `context` tokens.

    Empty where there is nothing to share: no drafter, one rank, or attention by data parallelism. Raises ConfigError
    for a GPU whose rates are not known.
    """
    if load.draft is None or load.ranks == 1 or load.attention_dp:
        return []
    return [_reckon(load, load.draft, context, ranks) for ranks in (1, load.ranks)]


def in_words(drafters: Sequence[DrafterOnRanks], context: float) -> str:
    """Both reckonings in one sentence."""
    parts = [
        f"{each.name} {' and '.join(f'{seconds * 1e6:,.0f}' for seconds in each.seconds.values())}" for each in drafters
    ]
    batches = " and ".join(map(str, drafters[0].seconds))
    return f"its pass over {context:,.0f} tokens at batch {batches}, us, estimated: {'; '.join(parts)}"


def preferred(drafters: Sequence[DrafterOnRanks]) -> DrafterOnRanks:
    """The one whose worst batch comes nearest to the best drafter of that batch."""

    def worst(each: DrafterOnRanks) -> float:
        return max(own / min(other.seconds[batch] for other in drafters) for batch, own in each.seconds.items())

    return min(drafters, key=worst)


def _reckon(load: ServingLoad, draft: DraftSizes, context: float, ranks: int) -> DrafterOnRanks:
    gpu_rates = rates(load.gpus.name, "trtllm")
    shape = dflash_shape(draft.spec, load.algorithms, runs_whole_block=load.workspace_bytes > 0)
    kv_bytes = 1 if load.is_fp8_context else 2

    def seconds(batch: int) -> float:
        step = StepLoad(batch=batch, num_draft_tokens=shape.max_draft_tokens, context=context)
        terms = drafter_terms(shape, step, gpu_rates, None, ranks=ranks, kv_bytes=kv_bytes)
        return sum(term.seconds for term in terms)

    row_bytes = draft.spec.context_bytes_per_token(fp8=load.is_fp8_context, num_ranks=ranks)
    return DrafterOnRanks(
        ranks=ranks,
        is_deployed=ranks == load.num_ranks,
        seconds={batch: seconds(batch) for batch in sorted({1, load.max_batch_size})},
        weight_bytes=draft.weight_bytes(load.algorithms, ranks),
        context_bytes=load.max_seq_len * row_bytes,
    )
