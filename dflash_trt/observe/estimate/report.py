# SPDX-License-Identifier: Apache-2.0
"""The values of `dflash-trt estimate`: accounts, curves with bands, memory and batch limits, headlines."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

import msgspec

from dflash_trt.deploy import memory
from dflash_trt.deploy.resolved_deployment import ServingLoad
from dflash_trt.deploy.schema import load_schema
from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile
from dflash_trt.observe.estimate.constants import Band, Influence, Rates, rates, vary
from dflash_trt.observe.estimate.curve import OperatingPoint, Traffic, point, points, rate_at
from dflash_trt.observe.estimate.drafter_pass import DrafterOnRanks, drafters_on_ranks
from dflash_trt.observe.estimate.shapes import Method, System
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.estimate.step_cost import StepLoad, Term
from dflash_trt.observe.plots.frontier import frontier

MAX_HEADLINES = 8
CACHES = "caches of requests"
MAX_BATCH = 4096


class MemoryItem(msgspec.Struct, frozen=True):
    name: str
    bytes: int


class BatchLimit(msgspec.Struct, frozen=True):
    """The largest batch of a method, and what prevents a larger one."""

    batch: int
    reason: str


def memory_items(system: System, method: Method, batch: int, tokens: int) -> tuple[MemoryItem, ...]:
    """Memory of one GPU while it serves `batch` requests of `tokens` tokens each."""
    load = _load(system, method, batch)
    items = [
        MemoryItem(item.name, item.bytes)
        for item in memory.memory_items(load, load_schema(system.runtime))[0]
        if not item.is_late
    ]
    return (*items, *_chain_items(system, method), MemoryItem(CACHES, _pool_bytes(system, method, load, tokens)))


def _load(system: System, method: Method, batch: int) -> ServingLoad:
    load = system.memory
    assert load is not None, "this system was made to ask for speed only"
    gpu = msgspec.structs.replace(load.gpus.gpu, memory_bytes=system.gpu_memory_bytes)
    return msgspec.structs.replace(
        load, gpus=msgspec.structs.replace(load.gpus, gpu=gpu),
        draft_sizes=load.draft_sizes if method == "dflash" else None, tensor_parallel=system.tensor_parallel,
        num_ranks=system.drafter_ranks, max_batch_size=-(-batch // system.replicas),
        max_num_tokens=system.max_num_tokens,
    )  # fmt: skip


def _pool_bytes(system: System, method: Method, load: ServingLoad, tokens: int) -> int:
    """Bytes of the pool that `load`'s requests of `tokens` tokens fill."""
    request = memory.request_bytes(msgspec.structs.replace(load, max_seq_len=tokens), load_schema(system.runtime))
    assert request is not None, "a shape knows its cache"
    if (draft := system.drafter(method)) is not None and draft.is_chain:
        heads = -(-draft.num_key_value_heads // system.ranks_of_drafter(method))
        request += tokens * draft.num_layers * 2 * heads * draft.head_dim * system.kv_bytes
    return load.max_batch_size * request


def _chain_items(system: System, method: Method) -> list[MemoryItem]:
    """Memory of the assumed EAGLE-3 drafter or of MTP layers, which deploy/memory does not know."""
    draft, target = system.drafter(method), system.target
    if draft is None or not draft.is_chain:
        return []
    weights = 2.0 * draft.head_rows * draft.hidden_size
    for term, gemms in draft.gemms.items():
        ranks = system.ranks_of_drafter(method) if term == "layers" else 1
        weights += sum(gemm.params * gemm.bits / 8 for gemm in gemms) / ranks
    experts = draft.num_expert_layers * target.num_experts * target.expert_params * target.expert_bits / 8
    weights += experts / system.tensor_parallel
    if method == "mtp":
        weights *= target.num_mtp_layers or 1
    captured = 2 * system.max_num_tokens * draft.num_taps * draft.hidden_size
    return [MemoryItem("drafter weights", round(weights)), MemoryItem("captured hidden states", captured)]


def batch_limit(system: System, method: Method, tokens: int, most: int = MAX_BATCH) -> BatchLimit:
    """The largest batch up to `most` whose requests hold `tokens` tokens each; 0 if not even one fits.

    As in TensorRT-LLM, a cache pool takes `pool_fraction` of the remaining memory, or less if later allocations need
    more.
    """

    schema = load_schema(system.runtime)

    def fits(batch: int) -> bool:
        load = _load(system, method, batch)
        late = sum(item.bytes for item in memory.memory_items(load, schema)[0] if item.is_late)
        fixed = sum(item.bytes for item in memory_items(system, method, batch, tokens) if item.name != CACHES)
        free = system.gpu_memory_bytes - fixed
        return _pool_bytes(system, method, load, tokens) <= min(
            int(free * memory.pool_fraction(load, schema)), free - late
        )

    by_tokens = system.max_num_tokens * system.replicas
    batch = bisect_left(range(1, min(most, by_tokens) + 1), True, key=lambda batch: not fits(batch))
    if batch == by_tokens:
        return BatchLimit(batch, f"max_num_tokens {system.max_num_tokens}: each request verifies at least 1")
    if batch == most:
        return BatchLimit(batch, "no bound found: the search ends here")
    what = "caches of requests" if batch else "weights alone"
    return BatchLimit(batch, f"memory: {what} of {tokens} tokens fill {system.gpu.name}")


class BandedPoint(msgspec.Struct, frozen=True):
    point: OperatingPoint
    user_rate: Band
    gpu_rate: Band


class MethodCurve(msgspec.Struct, frozen=True):
    method: Method
    limit: BatchLimit
    points: list[BandedPoint]
    """Fastest user first."""
    memory: tuple[MemoryItem, ...]
    """At the deployment's max_batch_size and the longest request that was asked for."""


class Account(msgspec.Struct, frozen=True):
    point: OperatingPoint
    terms: tuple[Term, ...]
    experts_touched: float
    """Experts of one layer that the step touches; 0 for a dense target."""


class Ratio(msgspec.Struct, frozen=True):
    """Throughput per GPU of each method at `user_rate` tokens per second for each user, up to the deployment's
    max_batch_size; 0 if a method does not reach it.
    """

    user_rate: float
    gpu_rates: dict[str, float]


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    system: System
    traffic: Traffic
    acceptance: AcceptanceProfile
    acceptance_source: str
    other_sources: tuple[str, ...]
    """Where the acceptance of MTP and n-grams is from."""
    accounts: list[Account]
    curves: list[MethodCurve]
    at_rates: list[Ratio]
    drafters: list[DrafterOnRanks]
    """The drafter whole on every GPU, and shared; empty on one GPU."""
    influences: list[Influence]
    """On the speed of one user alone, under DFlash."""

    def curve(self, method: Method) -> MethodCurve:
        return next(curve for curve in self.curves if curve.method == method)


def headline_rates(fronts: Mapping[Method, Sequence[OperatingPoint]]) -> list[float]:
    """Round speeds of a user in tokens per second, evenly spaced up to the fastest that any method reaches.

    Plain decoding's fastest comes first, if it is slower than the others.
    """
    fastest = max(point.user_rate for front in fronts.values() for point in front)
    unit = 10 ** math.floor(math.log10(fastest / MAX_HEADLINES))
    step = next(unit * n for n in (1, 2, 5, 10) if fastest / (unit * n) <= MAX_HEADLINES)
    plain = math.floor(max((point.user_rate for point in fronts.get("none", ())), default=0.0))
    return [*([float(plain)] if 0 < plain < step else []), *(step * n for n in range(1, int(fastest / step) + 1))]


def estimate(
    name: str, system: System, traffic: Traffic, acceptances: dict[Method, AcceptanceProfile], *, source: str,
    batch: int = 1, routing: Sequence[float] | None = None, other_sources: tuple[str, ...] = (),
) -> Estimate:  # fmt: skip
    """Predicts a system; `batch` is itemised, `source` names tau's origin. Raises ConfigError if no request fits."""
    if traffic.max_tokens > system.max_seq_len:
        raise ConfigError(
            f"{name}: expected requests of at most max_seq_len {system.max_seq_len} tokens, found"
            f" {traffic.prompt_tokens} + {traffic.output_tokens}",
            hint="raise max_seq_len in the deployment file, or lower --prompt-tokens and --output-tokens",
        )
    model = StepModel(system, rates(system.gpu, system.runtime), routing)
    fronts, curves, accounts = {}, [], []
    influences: list[Influence] = []
    for method in system.methods:
        acceptance = acceptances.get(method)
        limit = batch_limit(system, method, traffic.max_tokens, max(MAX_BATCH, batch))
        candidates = points(model, method, acceptance, traffic, max(limit.batch, batch))
        fronts[method] = frontier(p for p in candidates if p.batch <= limit.batch)
        bands, by_constant = _bands(system, method, acceptance, traffic, fronts[method], routing)
        if method == "dflash":
            influences = by_constant
        known = max(p.batch for p in candidates if p.batch <= batch)
        length = max((p for p in candidates if p.batch == known), key=lambda p: p.user_rate).num_draft_tokens
        at = point(model, method, acceptance, traffic, batch, length)
        load = StepLoad(batch=batch, num_draft_tokens=at.num_draft_tokens, context=traffic.mean_context)
        count = model.touched_experts(batch * (at.num_draft_tokens + 1))
        accounts.append(Account(at, model.price(method, load).terms, count))
        memory = memory_items(system, method, system.max_batch_size, traffic.max_tokens)
        curves.append(MethodCurve(method, limit, bands, memory))
    if not any(fronts.values()):
        raise ConfigError(
            f"estimate: no memory for a single request of {traffic.max_tokens} tokens: {curves[0].limit.reason}",
            hint="more GPUs, shorter requests or a smaller max_num_tokens",
        )
    served = {m: [p for p in front if p.batch <= system.max_batch_size] for m, front in fronts.items()}
    at_rates = [
        Ratio(rate, {method: rate_at(front, rate) for method, front in served.items()})
        for rate in (headline_rates(served) if any(served.values()) else ())
    ]
    return Estimate(
        name=name, system=system, traffic=traffic, acceptance=acceptances["dflash"], acceptance_source=source,
        other_sources=other_sources, accounts=accounts, curves=curves, at_rates=at_rates,
        drafters=drafters_on_ranks(system, traffic.mean_context),
        influences=influences,
    )  # fmt: skip


def _bands(
    system: System, method: Method, acceptance: AcceptanceProfile | None, traffic: Traffic, front: list[OperatingPoint],
    routing: Sequence[float] | None,
) -> tuple[list[BandedPoint], list[Influence]]:  # fmt: skip
    def predict(moved: Rates) -> list[float]:
        model = StepModel(system, moved, routing)
        return [point(model, method, acceptance, traffic, p.batch, p.num_draft_tokens).user_rate for p in front]

    if not front:
        return [], []
    bands, influences = vary(system.gpu, system.runtime, predict)
    share = [p.batch / system.num_gpus for p in front]
    curve = [
        BandedPoint(p, band, Band(p.gpu_rate, band.low * share, band.high * share))
        for p, band, share in zip(front, bands, share, strict=True)
    ]
    return curve, influences
