# SPDX-License-Identifier: Apache-2.0
"""Terms of a drafter's pass in the cost of a step."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dflash_trt.deploy.sizes import BF16_BITS
from dflash_trt.observe.estimate.constants import Rates
from dflash_trt.observe.estimate.kernel_times import kernel_seconds
from dflash_trt.observe.estimate.shapes import ROW_MULTIPLE, DraftShape, Gemm
from dflash_trt.observe.estimate.step_cost import ACTIVATION_BYTES, StepLoad, Term


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Turns hidden states into logits."""

    rows: int
    """Tokens that can be proposed."""
    bits: float = BF16_BITS
    ranks: int = 1
    """GPUs that share it: a target's lm_head is divided among its ranks, a drafter's own is on each."""

    def num_bytes(self, hidden_size: int) -> float:
        """Bytes of one rank's part."""
        return self.rows * hidden_size * self.bits / 8 / self.ranks


def drafter_terms(
    draft: DraftShape, load: StepLoad, rates: Rates, head: Head | None, *, ranks: int = 1, kv_bytes: int = 2
) -> list[Term]:
    """Cost that a drafter shared by `ranks` ranks adds to a step; without a `head` its term is left out."""
    # A chain runs, and reads, its layer once per draft token.
    passes = load.num_draft_tokens if draft.is_chain else 1
    block = draft.max_draft_tokens if draft.runs_whole_block else load.num_draft_tokens
    rows = load.batch * (1 if draft.is_chain else block + draft.first_proposing_row)
    drafted = load.batch * (1 if draft.is_chain else load.num_draft_tokens)
    verified = load.batch * (load.num_draft_tokens + 1) + load.prompt_tokens  # all become context
    layers = draft.num_layers * passes
    heads = -(-draft.num_key_value_heads // ranks)
    context = load.batch * load.context * layers * 2 * heads * draft.head_dim * kv_bytes
    gathered = load.batch * load.num_draft_tokens * draft.gathered_values * BF16_BITS / 8

    def term(
        name: str, tokens: float = 0, ranks: int = 1, passes: int = 1, seconds: float = 0, num_bytes: float = 0
    ) -> Term:
        gemms = linear(rates, name, "drafter", draft.gemms.get(name, ()) * passes, tokens, ranks)
        return Term(name, "drafter", gemms.seconds + seconds + num_bytes / rates.read_rate, gemms.bytes + num_bytes)

    attention = term("attention, context", seconds=layers * rates.attention_seconds, num_bytes=context)
    if draft.has_our_kernel:
        call = kernel_seconds(heads, draft.head_dim, kv_bytes, load.batch, load.context, rates.memory_bandwidth)
        attention = Term(attention.name, "drafter", layers * call, context)
    terms = [
        term("tap projection", verified),
        term("context K and V", verified, ranks),
        term("layers", rows, ranks, passes),
        attention,
        elementwise(rates, draft, passes, rows, ranks),
        term("block convolutions", rows, seconds=2 * draft.num_convolutions * rates.small_kernel_seconds),
        term("selector", drafted, num_bytes=gathered),
        allreduce(rates, "drafter's all-reduces", 2 * layers, rows * draft.hidden_size, ranks),
    ]
    if head is not None:
        gemm = Gemm(passes * head.rows * draft.hidden_size, head.bits, passes)
        terms.append(linear(rates, "lm_head", "drafter", [gemm], drafted, head.ranks))
    return terms


def linear(rates: Rates, name: str, part: str, gemms: Iterable[Gemm], tokens: float, ranks: int = 1) -> Term:
    """GEMMs whose weights `ranks` ranks share: each weight is read once for any number of tokens."""
    seconds = num_bytes = 0.0
    for gemm in gemms:
        if not gemm.params:
            continue
        read = gemm.params * gemm.bits / 8 / ranks
        rate = rates.compute_rate(gemm.compute_bits or gemm.bits)
        busy = max(read / rates.read_rate, 2 * gemm.params * tokens / ranks / rate)
        seconds += gemm.kernels * rates.gemm_seconds + busy
        num_bytes += read
    return Term(name, part, seconds, num_bytes)


def small_kernels_term(rates: Rates, name: str, part: str, layers: float) -> Term:
    return Term(name, part, layers * rates.small_kernels_per_layer * rates.small_kernel_seconds)


def elementwise(rates: Rates, draft: DraftShape, passes: int, rows: float, ranks: int) -> Term:
    """A drafter's kernels other than GEMMs and attention, by backend, each with its reads and writes."""
    if draft.is_chain:
        return small_kernels_term(rates, "elementwise kernels", "drafter", draft.num_layers * passes)
    kernels = draft.small_kernels
    count = kernels.count + (kernels.count_unless_16 if rows % ROW_MULTIPLE else 0)
    moved = rows * (kernels.hidden_values + kernels.shared_values / ranks) * ACTIVATION_BYTES
    fixed = count * rates.small_kernel_seconds + kernels.scalar_seconds
    return Term("elementwise kernels", "drafter", fixed + moved / rates.read_rate)


def allreduce(rates: Rates, name: str, count: float, elements: float, ranks: int) -> Term:
    if ranks == 1:
        return Term(name, "communication", 0.0)
    sent = 2 * (ranks - 1) / ranks * elements * ACTIVATION_BYTES
    seconds = rates.allreduce_seconds + sent / (rates.link_bandwidth * rates.link_efficiency)
    return Term(name, "communication", count * seconds)
