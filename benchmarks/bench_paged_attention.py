# SPDX-License-Identifier: Apache-2.0
"""The target's attention on this machine's CPU: C++ over pages, against torch's operators over copies of them.

One layer of a pass, its rows' place in the caches included, in CPU time of one thread: the least of several rounds.
GFLOP/s count what a causal mask leaves, 4 * head_dim for a query head and position. A pass has `requests` segments of
`tokens` tokens after `context` rows each, in float32 and bfloat16. Prints a table, asserts nothing; a minute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY))

from dflash_trt.cli.output import print_table  # noqa: E402
from dflash_trt.engine.signatures import TOKENS_PER_PAGE  # noqa: E402
from dflash_trt.files.processor import cpu_model  # noqa: E402
from dflash_trt.runtime.cpu.accelerate import PagedPass  # noqa: E402
from dflash_trt.runtime.kvcache.slot_cache import SlotCache  # noqa: E402
from dflash_trt.runtime.targets.packed_pass import (  # noqa: E402
    AttentionRule,
    GatheredPass,
    RaggedPass,
)
from dflash_trt.runtime.targets.target import Segment  # noqa: E402

SHAPES = {"tiny-qwen3": (8, 4, 32), "tiny-gpt-oss": (8, 2, 16), "qwen3-0.6b": (16, 8, 128), "gpt-oss-120b": (64, 8, 64)}
"""Query heads, KV heads, head_dim."""
PASSES = ((1, 1, 300), (1, 8, 300), (16, 1, 300), (16, 8, 300), (1, 1, 4000), (1, 2000, 0))
"""Requests, tokens of each, context."""
LAYERS = 4
CPU = torch.device("cpu")


@click.command()
@click.option("--rounds", default=7, show_default=True, help="Rounds of at least 30 ms each.")
def main(rounds: int) -> None:
    """Print CPU time of one layer's attention."""
    torch.set_num_threads(1)
    rows = []
    for name, heads in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for requests, tokens, context in PASSES:
                paged, gathered = (
                    best(layers_of(pass_type, requests, tokens, context, heads, dtype), rounds)
                    for pass_type in (PagedPass, GatheredPass)
                )
                work = requests * tokens * heads[0] * (context + tokens / 2) * 4 * heads[2]
                numbers = (f"{paged * 1e6:.0f}", f"{gathered * 1e6:.0f}", f"{gathered / paged:.1f}")
                what = (name, str(dtype).removeprefix("torch."), str(requests), str(tokens), str(context))
                rows.append((*what, *numbers, f"{work / paged / 1e9:.0f}"))
    columns = ("shape", "type", "requests", "tokens", "context", "C++, us", "torch, us", "ratio", "GFLOP/s of C++")
    print_table(f"attention of a layer, {cpu_model()}, one thread", columns, rows)


@torch.inference_mode()
def layers_of(
    pass_type: type[RaggedPass],
    requests: int,
    tokens: int,
    context: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
) -> Callable[[], None]:
    """A pass of LAYERS layers over sequences that hold `context` tokens, to be run again and again."""
    query_heads, kv_heads, head_dim = heads
    cache = SlotCache(requests, CPU)
    pages = -(-(context + tokens) // TOKENS_PER_PAGE)

    def attend(count: int) -> Callable[[], None]:
        segments = [Segment(slot=slot, token_ids=[0] * count, num_logits=0) for slot in range(requests)]
        for slot in range(requests):
            cache.table.cover(slot, count)
        shapes = ((requests * count, number, head_dim) for number in (query_heads, kv_heads, kv_heads))
        query, key, value = (torch.randn(shape).to(dtype).transpose(0, 1) for shape in shapes)

        def run() -> None:
            current = pass_type(segments, cache, CPU)
            for layer in range(LAYERS):
                current.attend(layer, query, key, value, AttentionRule(head_dim**-0.5))

        return run

    for slot in range(requests):
        cache.table.reserve(slot, range(slot * pages, (slot + 1) * pages), 0)
    if context:
        attend(context)()
        cache.table.lengths[:] = [context] * requests
    return attend(tokens)


@torch.inference_mode()
def best(run: Callable[[], None], rounds: int) -> float:
    """Seconds of CPU time a layer."""
    run()
    seconds = []
    for _ in range(rounds):
        begin, count = time.process_time(), 0
        while (elapsed := time.process_time() - begin) < 0.03:
            run()
            count += 1
        seconds.append(elapsed / count / LAYERS)
    return min(seconds)


if __name__ == "__main__":
    main()
