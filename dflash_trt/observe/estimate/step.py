# SPDX-License-Identifier: Apache-2.0
"""Cost of one decode step, term by term, on one GPU of a system.

A kernel takes a fixed time and the larger of bytes / rate and flops / rate; kernels run one after the other. With B
requests and K drafts a step verifies n = B (K + 1) tokens. Seconds and bytes are of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from dflash_trt.deploy.sizes import BF16_BITS
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.observe.estimate.constants import Rates
from dflash_trt.observe.estimate.kernel_times import expert_seconds, kernel_seconds, power_law, skew, touched
from dflash_trt.observe.estimate.shapes import ROW_MULTIPLE, DraftShape, Gemm, Method, System

ACTIVATION_BYTES = 2  # BF16
STATE_FLOPS = 7
"""Flops per token and element of recurrent state: decay, k S, the added outer product, q S."""


class Term(msgspec.Struct, frozen=True):
    name: str
    part: str
    """target, drafter, communication or host."""
    seconds: float
    bytes: float = 0.0
    """Read from memory, and of recurrent states also written."""


class StepCost(msgspec.Struct, frozen=True):
    terms: tuple[Term, ...]

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def bytes(self) -> float:
        """Read from one GPU's memory."""
        return sum(term.bytes for term in self.terms)


class StepLoad(msgspec.Struct, frozen=True, kw_only=True):
    batch: float
    num_draft_tokens: int
    """K; 0 decodes plainly."""
    context: float
    """Tokens of a request that are in the caches, mean."""
    prompt_tokens: float = 0
    """Tokens of new requests' prompts that join the step."""
    prompts: float = 0
    """Prompts that end with them."""

    @property
    def prompt_length(self) -> float:
        """Tokens of one whole prompt."""
        return self.prompt_tokens / self.prompts if self.prompts else self.prompt_tokens


class StepModel:
    def __init__(self, system: System, rates: Rates, routing: Sequence[float] | None = None) -> None:
        """`routing` is the measured probability that a token takes each expert; power law unless given."""
        self.system = system
        self.rates = rates
        target = system.target
        self._routing = routing
        if routing is None and target.num_experts:
            self._routing = power_law(target.num_experts, target.top_k, rates.routing_exponent)
        self._skew = skew(self._routing) if self._routing else 0.0

    def price(self, method: Method, load: StepLoad) -> StepCost:
        """The account of one step; `num_draft_tokens` 0 is plain decoding whatever the method."""
        draft = self.system.drafter(method) if load.num_draft_tokens and load.batch else None
        width = 1 if draft is None else load.num_draft_tokens + 1
        replicas = self.system.replicas
        load = StepLoad(
            batch=load.batch / replicas, num_draft_tokens=load.num_draft_tokens, context=load.context,
            prompt_tokens=self.rates.prompt_factor * load.prompt_tokens / replicas, prompts=load.prompts / replicas,
        )  # fmt: skip
        terms = [*self._target(load, width)]
        if draft is not None:
            system, target = self.system, self.system.target
            head = Head(rows=draft.head_rows or target.vocab_size, bits=target.head_bits, ranks=system.dense_ranks)
            ranks = system.ranks_of_drafter(method)
            kv_bytes = system.draft_kv_bytes if method == "dflash" else system.kv_bytes
            terms += drafter_terms(draft, load, self.rates, head, ranks=ranks, kv_bytes=kv_bytes)
        if self.system.attention_dp:
            busy = sum(term.seconds for term in terms)
            terms.append(Term("waiting for other ranks", "communication", (self.rates.attention_dp_wait - 1) * busy))
        terms.append(Term("host", "host", self._host(load, is_speculative=draft is not None)))
        return StepCost(tuple(term for term in terms if term.seconds))

    def _host(self, load: StepLoad, *, is_speculative: bool) -> float:
        """Host work that no kernel hides: of the step, of each request in it, and of each that joined it."""
        rates = self.rates
        joining = load.prompts * rates.host_prompt_seconds
        if is_speculative:
            return joining + rates.host_speculative_seconds + load.batch * rates.host_speculative_request_seconds
        return joining + rates.host_plain_seconds + load.batch * rates.host_request_seconds

    def touched_experts(self, tokens: float) -> float:
        """Experts of one layer that `tokens` tokens take between them, all ranks together."""
        return touched(self._routing or (), tokens)

    def _target(self, load: StepLoad, width: int) -> list[Term]:
        target, ranks, rates = self.system.target, self.system.dense_ranks, self.rates
        verified = load.batch * width
        tokens = verified + load.prompt_tokens
        layers = target.num_layers
        mlps = layers if target.shared_intermediate_size else layers - target.num_expert_layers

        def term(
            name: str, params: int, kernels: int, bits: float = target.weight_bits, tokens: float = tokens,
            ranks: int = ranks,
        ) -> Term:  # fmt: skip
            return linear(rates, name, "target", [Gemm(params, bits, kernels)], tokens, ranks)

        terms = [
            term("attention projections", target.attention_params, self._projections(target)),
            term("latent projections", target.replicated_attention_params, target.num_attention_layers, ranks=1),
            self._attention(load, width),
            self._delta_nets(load, width),
            term("MLPs", target.mlp_params, 2 * mlps),
            _small(rates, "norms, RoPE and cache writes", "target", layers),
            term("lm_head", target.head_params, 1, target.head_bits, verified),
        ]
        if target.num_experts:
            terms.insert(4, self._experts(target, tokens * self.system.replicas))
            terms.insert(5, Term("router", "target", target.num_expert_layers * rates.gemm_seconds))
        # Attention by data parallelism gathers all ranks' tokens before the experts and scatters them afterwards.
        layers *= 1 if self.system.attention_dp else 2
        sent = tokens * self.system.replicas * target.hidden_size
        terms.append(_allreduce(rates, "all-reduces", layers, sent, self.system.tensor_parallel))
        return terms

    @staticmethod
    def _projections(target: TargetShape) -> int:
        """GEMMs of all layers: qkv and o; of latent attention q, the two halves of K and V, o; of a delta net three."""
        attention = 2 if target.latent is None else 4
        return attention * target.num_attention_layers + 3 * target.num_linear_layers

    def _attention(self, load: StepLoad, width: int) -> Term:
        """Each request's cache is read once, whatever the width of its block; prompts have kernels of their own."""
        target, ranks, rates = self.system.target, self.system.dense_ranks, self.rates
        cache, peak = target.cache, self.rates.bf16_flops
        num_bytes = load.batch * cache.row_numbers(load.context, ranks, is_read=True) * self.system.kv_bytes
        full = msgspec.structs.replace(cache, num_sliding_layers=0)
        full_bytes = load.batch * full.row_numbers(load.context, ranks, is_read=True) * self.system.kv_bytes
        reading = full_bytes / rates.read_rate
        reading += (num_bytes - full_bytes) / (rates.memory_bandwidth * rates.window_bandwidth_efficiency)
        flops = target.attention_flops(load.batch * width, cache.rows(load.context), ranks, is_prompt=False)
        busy = max(reading, flops / (peak * rates.attention_compute_efficiency))
        # A prompt's tokens see each other; half of them, on average.
        length = load.prompt_length / 2
        for rows, efficiency in (
            (cache.num_full_layers * cache.full_rows(length), rates.attention_compute_efficiency),
            (cache.num_sliding_layers * min(length, cache.sliding_window), rates.window_compute_efficiency),
        ):
            own = target.attention_flops(load.prompt_tokens, rows, ranks, is_prompt=True)
            busy += own / (peak * efficiency)
        floor = target.num_attention_layers * rates.attention_seconds
        return Term("attention, KV cache", "target", floor + busy, num_bytes)

    def _delta_nets(self, load: StepLoad, width: int) -> Term:
        """Each request's state is read once and written after every verified token, until some are accepted."""
        state, name = self.system.target.cache.recurrent, "delta nets, state"
        if state is None:
            return Term(name, "target", 0.0)
        num_bytes = load.batch * (1 + width) * state.bytes(self.system.dense_ranks)
        numbers = state.num_layers * state.num_value_heads * state.key_head_dim * state.value_head_dim
        tokens = load.batch * width + load.prompt_tokens
        flops = STATE_FLOPS * tokens * numbers / self.system.dense_ranks
        busy = max(num_bytes / self.rates.read_rate, flops / self.rates.compute_rate(16))
        return Term(name, "target", state.num_layers * self.rates.attention_seconds + busy, num_bytes)

    def _experts(self, target: TargetShape, tokens: float) -> Term:
        system = self.system
        count = self.touched_experts(tokens)
        layer = expert_seconds(system, tokens, count, self._skew, self.rates)
        num_bytes = count * target.expert_params * target.expert_bits / 8 / system.tensor_parallel
        layers = target.num_expert_layers
        return Term("experts", "target", layers * layer, layers * num_bytes)


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Turns hidden states into logits."""

    rows: int
    """Tokens that can be proposed."""
    bits: float = BF16_BITS
    ranks: int = 1
    """GPUs that share it: a target's lm_head is divided among its ranks, a drafter's own stands on each."""

    def num_bytes(self, hidden_size: int) -> float:
        """Bytes of one rank's part."""
        return self.rows * hidden_size * self.bits / 8 / self.ranks


def drafter_terms(
    draft: DraftShape, load: StepLoad, rates: Rates, head: Head | None, *, ranks: int = 1, kv_bytes: int = 2
) -> list[Term]:
    """Cost that a drafter shared by `ranks` ranks adds to a step; without a `head` its term is left out."""
    # A chain passes its layer once for each draft, and reads it as often.
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
        _elementwise(rates, draft, passes, rows, ranks),
        term("block convolutions", rows, seconds=2 * draft.num_convolutions * rates.small_kernel_seconds),
        term("selector", drafted, num_bytes=gathered),
        _allreduce(rates, "drafter's all-reduces", 2 * layers, rows * draft.hidden_size, ranks),
    ]
    if head is not None:
        gemm = Gemm(passes * head.rows * draft.hidden_size, head.bits, passes)
        terms.append(linear(rates, "lm_head", "drafter", [gemm], drafted, head.ranks))
    return terms


def linear(rates: Rates, name: str, part: str, gemms: Iterable[Gemm], tokens: float, ranks: int = 1) -> Term:
    """GEMMs whose weights `ranks` ranks share: each weight is read once, whatever the tokens."""
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


def _small(rates: Rates, name: str, part: str, layers: float) -> Term:
    return Term(name, part, layers * rates.small_kernels_per_layer * rates.small_kernel_seconds)


def _elementwise(rates: Rates, draft: DraftShape, passes: int, rows: float, ranks: int) -> Term:
    """A drafter's kernels beside GEMMs and attention: the backend's, each with what it reads and writes."""
    if draft.is_chain:
        return _small(rates, "elementwise kernels", "drafter", draft.num_layers * passes)
    kernels = draft.small_kernels
    count = kernels.count + (kernels.count_unless_16 if rows % ROW_MULTIPLE else 0)
    moved = rows * (kernels.hidden_values + kernels.shared_values / ranks) * ACTIVATION_BYTES
    fixed = count * rates.small_kernel_seconds + kernels.scalar_seconds
    return Term("elementwise kernels", "drafter", fixed + moved / rates.read_rate)


def _allreduce(rates: Rates, name: str, count: float, elements: float, ranks: int) -> Term:
    if ranks == 1:
        return Term(name, "communication", 0.0)
    sent = 2 * (ranks - 1) / ranks * elements * ACTIVATION_BYTES
    seconds = rates.allreduce_seconds + sent / (rates.link_bandwidth * rates.link_efficiency)
    return Term(name, "communication", count * seconds)
