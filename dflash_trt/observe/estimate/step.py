# SPDX-License-Identifier: Apache-2.0
"""Cost of one decode step, term by term, on one GPU of a system.

A kernel takes a fixed time and the larger of bytes / rate and flops / rate; kernels run one after the other. With B
requests and K drafts a step verifies n = B (K + 1) tokens. Seconds and bytes are of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.observe.estimate.constants import Rates
from dflash_trt.observe.estimate.drafter_terms import Head, allreduce, drafter_terms, linear, small_kernels_term
from dflash_trt.observe.estimate.expert_routing import power_law, skew, touched
from dflash_trt.observe.estimate.kernel_times import expert_seconds
from dflash_trt.observe.estimate.shapes import Gemm, Method, System
from dflash_trt.observe.estimate.step_cost import StepCost, StepLoad, Term

STATE_FLOPS = 7
"""Flops per token and element of recurrent state: decay, k S, the added outer product, q S."""


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
        """The itemised cost of one step; `num_draft_tokens` 0 is plain decoding for any method."""
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
            if draft.num_layers:
                terms += drafter_terms(draft, load, self.rates, head, ranks=ranks, kv_bytes=kv_bytes)
            if layers := draft.num_expert_layers * load.num_draft_tokens:
                terms.append(self._experts("drafter", layers, load.batch * system.replicas))
        if self.system.attention_dp:
            busy = sum(term.seconds for term in terms)
            terms.append(Term("waiting for other ranks", "communication", (self.rates.attention_dp_wait - 1) * busy))
        terms.append(Term("host", "host", self._host(load, is_speculative=draft is not None)))
        return StepCost(tuple(term for term in terms if term.seconds))

    def _host(self, load: StepLoad, *, is_speculative: bool) -> float:
        """Host work that no kernel hides: per step, per request in it, and per request that joins it."""
        rates = self.rates
        joining = load.prompts * rates.host_prompt_seconds
        if is_speculative:
            return joining + rates.host_speculative_seconds + load.batch * rates.host_speculative_request_seconds
        return joining + rates.host_plain_seconds + load.batch * rates.host_request_seconds

    def touched_experts(self, tokens: float) -> float:
        """Distinct experts of one layer that `tokens` tokens use, over all ranks."""
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
            small_kernels_term(rates, "norms, RoPE and cache writes", "target", layers),
            term("lm_head", target.head_params, 1, target.head_bits, verified),
        ]
        if target.num_experts:
            terms.insert(4, self._experts("target", target.num_expert_layers, tokens * self.system.replicas))
            terms.insert(5, Term("router", "target", target.num_expert_layers * rates.gemm_seconds))
        # Attention by data parallelism gathers all ranks' tokens before the experts and scatters them afterwards.
        layers *= 1 if self.system.attention_dp else 2
        sent = tokens * self.system.replicas * target.hidden_size
        terms.append(allreduce(rates, "all-reduces", layers, sent, self.system.tensor_parallel))
        return terms

    @staticmethod
    def _projections(target: TargetShape) -> int:
        """GEMMs of all layers: qkv and o; of latent attention q, the two halves of K and V, o; of a delta net three."""
        attention = 2 if target.latent is None else 4
        return attention * target.num_attention_layers + 3 * target.num_linear_layers

    def _attention(self, load: StepLoad, width: int) -> Term:
        """Each request's cache is read once for a block of any width; prompts have separate kernels."""
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

    def _experts(self, part: str, layers: int, tokens: float) -> Term:
        system, target = self.system, self.system.target
        count = self.touched_experts(tokens)
        layer = expert_seconds(system, tokens, count, self._skew, self.rates)
        num_bytes = count * target.expert_params * target.expert_bits / 8 / system.tensor_parallel
        return Term("experts", part, layers * layer, layers * num_bytes)
